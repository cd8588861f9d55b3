"""Reads the phases of an engine's start from its worker's log, and limits the time without progress."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.5
READ_BYTES_MAX = 1 << 20
"""Bytes read per look at the log; the rest is read at the next one. A start writes some hundred KiB."""
PERCENT_STEP = 25
"""Progress of a bar is printed in steps of this many percent."""
PHASES = (
    (re.compile(r"(?:Downloading|Fetching)\b.*?:\s+(\d+)%"), "downloading the model"),
    (re.compile(r"(?:checkpoint shards|np_cache).*?:\s+(\d+)%"), "loading weights"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading weights took"), "weights are loaded"),
    (re.compile(r"Compiling a graph|Dynamo bytecode transform"), "compiling the model (torch.compile)"),
    (re.compile(r"torch\.compile took"), "the model is compiled"),
    (re.compile(r"Capturing CUDA graphs.*?:\s+(\d+)%"), "capturing CUDA graphs"),
    (re.compile(r"Available KV cache memory"), "memory is measured"),
    (re.compile(r"Graph capturing finished"), "CUDA graphs are captured"),
)
"""Log lines of vLLM, its loaders and the hub's client, with the phase that each shows. The first group is a percentage."""


def phase_of(line: str) -> str:
    """Returns the phase of a start that a log line shows, in words; empty for most lines."""
    for pattern, words in PHASES:
        if match := pattern.search(line):
            if not match.groups():
                return words
            return f"{words}: {int(match[1]) // PERCENT_STEP * PERCENT_STEP} %"
    return ""


class LogWatch:
    """Reads one log as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = ""
        self._phases: set[str] = set()

    def new_phases(self) -> list[str]:
        """Returns phases that the log shows for the first time; none if the file does not exist yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(READ_BYTES_MAX)
        except OSError:
            return []
        self._offset += len(data)
        # Progress bars overwrite their line with \r. The start of an incomplete line is kept for the next read.
        *lines, self._rest = re.split(r"[\r\n]", self._rest + data.decode(errors="replace"))
        found = []
        for line in lines:
            phase = phase_of(line)
            if phase and phase not in self._phases:
                self._phases.add(phase)
                found.append(phase)
        return found


async def wait_while_it_goes_on(work: Awaitable[T], count: Callable[[], int], limit_s: float) -> T:
    """Returns the result of `work`. Cancels it and raises TimeoutError if `count()` has not changed for `limit_s`."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(limit_s) as deadline:

        async def watch() -> None:
            last = count()
            while True:
                await asyncio.sleep(min(POLL_S, limit_s / 4))
                if (now := count()) != last:
                    last = now
                    deadline.reschedule(loop.time() + limit_s)

        watching = asyncio.create_task(watch())
        try:
            return await work
        finally:
            watching.cancel()
