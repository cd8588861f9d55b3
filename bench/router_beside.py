"""Compares the router with Dynamo's `SelectionService` and `RadixTree` in one run: `python -m bench.router --dynamo DIR`.

Each figure is the best of several rounds. kvmesh's decision is `RouterCore.ask`: lookup, scoring of prefill and decode workers, reservation,
history. Dynamo's `select` looks up and scores one pool and reserves nothing. kvmesh's index has a million blocks, Dynamo's only the prompts of
the requests.
"""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.router import BLOCK, SEED, fill, fleet, measure
from bench.router_index import fleet_with_shared_prefixes, rate, uncached_lookup
from bench.table import render
from services.router.index.cached_tokens import tokens_by_bit

PROMPTS = 8
COLUMNS = (
    *("workers", "blocks", "decision us CPU", "SelectionService.select us CPU", "us wall", "ours / theirs (CPU)"),
    *("lookup us", "RadixTree us", "ours / theirs"),
)


def dynamo(directory: Path, script: str, given: dict[str, Any]) -> dict[str, float]:
    """Runs one of the benchmark's scripts in Dynamo's environment and returns its output."""
    command = [str(directory / "bin" / "python"), "-P", str(Path(__file__).with_name(script))]
    done = subprocess.run(command, input=json.dumps(given) + "\n", stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def row(*, workers: int, blocks: int, depths: int, for_s: float, directory: Path) -> list[str]:
    generator = random.Random(SEED)
    prompts = [[generator.getrandbits(63) for _ in range(blocks)] for _ in range(PROMPTS)]
    choices = [[generator.randint(1, blocks) for _ in range(depths)] for _ in prompts]
    held = [[generator.choice(each) for _ in range(workers)] for each in choices]
    theirs = dynamo(directory, "dynamo_select.py", {"blocks": blocks, "held": held})
    theirs |= dynamo(
        directory, "dynamo_radix.py", {"prompts": prompts, "held": [list(enumerate(each)) for each in held]}
    )
    core = fleet(workers, workers // 2, "kv")
    decision_us = 1e6 * measure(core, fill(core, blocks, depths), workers, for_s=for_s).best_tenth_cpu_s
    index, asked = fleet_with_shared_prefixes(workers, blocks, PROMPTS)
    lookup_us = 1e6 / rate(lambda i: tokens_by_bit(uncached_lookup(index, asked[i % PROMPTS]), BLOCK, workers // 8 + 1))
    return [
        *(str(workers), str(blocks)),
        *(f"{decision_us:.1f}", f"{theirs['select_cpu_us']:.1f}", f"{theirs['select_us']:.1f}"),
        f"{decision_us / theirs['select_cpu_us']:.2f}",
        *(f"{lookup_us:.1f}", f"{theirs['lookup_us']:.1f}", f"{lookup_us / theirs['lookup_us']:.2f}"),
    ]


def main(workers: Sequence[int], blocks: Sequence[int], depths: int, *, for_s: float, directory: Path) -> None:
    lines = []
    for number in workers:
        for length in blocks:
            lines.append(row(workers=number, blocks=length, depths=depths, for_s=for_s, directory=directory))
            print(" ".join(lines[-1]), file=sys.stderr, flush=True)
    print("a decision and a lookup, kvmesh and Dynamo in the same run; CPU time of all threads\n")
    print(render(COLUMNS, lines))
