"""Prints the cost of the router's index: `python -m bench.router_index`. Single process, one thread."""

import random
import sys
import time
import tracemalloc
from collections.abc import Callable

from services.router.index import HolderIndex

SEED = 7


def rate(action: Callable[[int], object], *, for_s: float = 1.0) -> float:
    """Calls per second."""
    started = time.perf_counter()
    calls = 0
    while time.perf_counter() - started < for_s:
        for _ in range(50):
            action(calls)
            calls += 1
    return calls / (time.perf_counter() - started)


def holder_index(holders: int) -> tuple[HolderIndex, list[int]]:
    """An index and its holders' bits."""
    index = HolderIndex()
    for bit in range(holders):
        index.add_holder(bit)
    return index, list(range(holders))


def fleet_with_shared_prefixes(workers: int, blocks: int) -> tuple[HolderIndex, list[list[int]]]:
    """Every worker holds a part of each of 32 prompts: about 8 distinct depths per prompt."""
    generator = random.Random(SEED)
    index, bits = holder_index(workers)
    prompts = [[generator.getrandbits(64) for _ in range(blocks)] for _ in range(32)]
    for prompt in prompts:
        depths = [generator.randint(1, blocks) for _ in range(8)]
        for bit in bits:
            index.stored(bit, prompt[: generator.choice(depths)])
    return index, prompts


def print_lookups() -> None:
    print("lookups: longest prefix of every worker, 8 distinct depths")
    for workers in (8, 64, 512):
        for blocks in (32, 128, 512, 2048):
            index, prompts = fleet_with_shared_prefixes(workers, blocks)
            per_s = rate(lambda i: index.match(prompts[i % 32]))  # noqa: B023 - called before the next turn
            print(f"  {workers:4} workers {blocks:5} blocks  {per_s:10,.0f}/s  {1e6 / per_s:7.1f} us")


def print_events() -> None:
    generator = random.Random(SEED)
    index, bits = holder_index(64)
    runs = [[generator.getrandbits(64) for _ in range(64)] for _ in range(4000)]
    total = sum(map(len, runs))
    for name, action in (
        ("stored, new", lambda i: index.stored(bits[i % 64], runs[i])),
        ("stored by a second worker", lambda i: index.stored(bits[(i + 1) % 64], runs[i])),
        ("removed by the first", lambda i: index.removed(bits[i % 64], runs[i][::-1])),
        ("removed by the last", lambda i: index.removed(bits[(i + 1) % 64], runs[i][::-1])),
    ):
        started = time.perf_counter()
        for i in range(len(runs)):
            action(i)
        print(f"  {name:28} {total / (time.perf_counter() - started) / 1e6:6.2f} M blocks/s")


def print_memory() -> None:
    for holders in (1, 512):
        index, bits = holder_index(holders)
        generator = random.Random(SEED)
        blocks = 1_000_000 if holders == 1 else 100_000
        tracemalloc.start()
        for _ in range(blocks // 100):
            run = [generator.getrandbits(64) for _ in range(100)]
            for bit in bits:
                index.stored(bit, run)
        print(f"  {blocks:,} blocks held by {holders}: {tracemalloc.get_traced_memory()[0] / blocks:.0f} bytes a block")
        tracemalloc.stop()


def main() -> None:
    """All figures."""
    print(f"Python {sys.version.split()[0]}")
    print_lookups()
    print("events, 64 workers, runs of 64 blocks")
    print_events()
    print("memory")
    print_memory()


if __name__ == "__main__":
    main()
