"""Reads CPU time and memory of process trees from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """Resources that a process tree has used. Ended children count once their parent has waited for them."""

    cpu_s: float
    rss_mib: float


def process_use(pid: int) -> ProcessUse:
    """Returns the use of the tree under `pid`; zero if it has ended."""
    cpu_s, rss = 0.0, 0
    for member in [pid, *descendants(pid)]:
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        cpu_s += sum(int(value) for value in fields[11:15]) / TICKS_PER_S
        rss += int(fields[21]) * PAGE_BYTES
    return ProcessUse(cpu_s=cpu_s, rss_mib=rss / 2**20)


def own_rss_mib(pid: int) -> float:
    """Returns the resident memory of one process without its children; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 2**20
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def pss_mib(pid: int) -> float:
    """Returns a process's PSS, which divides each shared page among its processes, so that the figures can be added. Returns 0 if it has
    ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def descendants(pid: int) -> list[int]:
    """Returns the process ids of all descendants."""
    try:
        children = [
            int(word)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for word in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [member for child in children for member in [child, *descendants(child)]]
