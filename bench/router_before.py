"""Compares the router's decisions with those of an earlier commit, in alternation: `python -m bench.router --before 1bbc2d1`.

Each turn starts a process of each tree, which measures one row for `--seconds`. The result is the best tenth of the rounds of the best turn: the
cost of the code without disturbance by other processes.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.earlier import earlier_tree
from bench.services import ROOT
from bench.table import render

_ROW = re.compile(r"^ *(?P<workers>\d+) +(?P<blocks>\d+) \| +(?P<best_tenth>[\d,]+) ", re.MULTILINE)
COLUMNS = ("workers", "blocks", "decisions per CPU-second", "before", "times as long")


def decisions_per_s(root: Path, *, workers: int, blocks: int, depths: int, for_s: float) -> int:
    """Runs the benchmark of a tree for one row."""
    flags = ("--workers", workers, "--blocks", blocks, "--depths", depths, "--seconds", for_s)
    command = [sys.executable, "-m", "bench.router", *map(str, flags)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    match = _ROW.search(done.stdout)
    if match is None:
        raise RuntimeError(f"the benchmark of {root} prints no row:\n{done.stdout}")
    return int(match["best_tenth"].replace(",", ""))


def main(commit: str, *, workers: Sequence[int], blocks: Sequence[int], depths: int, for_s: float, turns: int) -> None:
    """Prints the table."""
    lines = []
    with earlier_tree(commit) as earlier:
        for number in workers:
            for length in blocks:
                best = dict.fromkeys((ROOT, earlier), 0)
                for _ in range(turns):
                    for root in best:
                        found = decisions_per_s(root, workers=number, blocks=length, depths=depths, for_s=for_s)
                        best[root] = max(best[root], found)
                now, before = best.values()
                lines.append([str(number), str(length), f"{now:,}", f"{before:,}", f"{before / now:.2f}"])
                print(" ".join(lines[-1]), file=sys.stderr, flush=True)
    print(render(COLUMNS, lines))
