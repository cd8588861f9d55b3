"""Measures the cost of the router's index in one process and thread: `python -m bench.router_index [--dynamo DIR]`.

With DIR, a virtual environment with Dynamo, the same run measures its `RadixTree` on the same prompts.
"""

import argparse
import json
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

from services.router.index.cached_tokens import tokens_by_bit
from services.router.index.holder_index import HolderIndex
from services.router.index.lazy_index import LazyIndex
from services.router.index.lookup_cache import Prefixes
from services.router.index.predicted_index import Lifetime, PredictedIndex

SEED = 7
BLOCK_SIZE = 16
ROUNDS = 5
ROUND_S = 0.15


def rate(action: Callable[[int], object]) -> float:
    """Returns calls per CPU-second in the best of a few rounds, because other programs slow some rounds."""
    best = 0.0
    for _ in range(ROUNDS):
        started = time.process_time()
        calls = 0
        while (spent := time.process_time() - started) < ROUND_S:
            for _ in range(50):
                action(calls)
                calls += 1
        best = max(best, calls / spent)
    return best


def holder_index(holders: int) -> tuple[HolderIndex, list[int]]:
    """Returns an index and the bits of its holders."""
    index = HolderIndex()
    for bit in range(holders):
        index.add_holder(bit)
    return index, list(range(holders))


def shared_prefixes(workers: int, blocks: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns prompts and the depth to which each worker holds each prompt, with at most 8 distinct depths."""
    generator = random.Random(SEED)
    prompts = [[generator.getrandbits(63) for _ in range(blocks)] for _ in range(count)]
    depths = []
    for _ in prompts:
        choices = [generator.randint(1, blocks) for _ in range(8)]
        depths.append([generator.choice(choices) for _ in range(workers)])
    return prompts, depths


def fleet_with_shared_prefixes(workers: int, blocks: int, count: int = 32) -> tuple[HolderIndex, list[list[int]]]:
    """Returns the index of the prompts of `shared_prefixes`."""
    index, bits = holder_index(workers)
    prompts, depths = shared_prefixes(workers, blocks, count)
    for prompt, held in zip(prompts, depths, strict=True):
        for bit, depth in zip(bits, held, strict=True):
            index.store(bit, prompt[:depth])
    return index, prompts


def uncached_lookup(index: HolderIndex, prompt: Sequence[int]) -> Prefixes:
    """Looks a prompt up after clearing the lookup cache."""
    index._lookup_cache.clear()
    return index.prefixes(prompt)


def print_lookups() -> None:
    print("lookups: longest prefix of every worker, 8 distinct depths; uncached and cached")
    for workers in (8, 64, 512):
        for blocks in (32, 128, 512, 2048):
            index, prompts = fleet_with_shared_prefixes(workers, blocks)
            anew = rate(lambda i: uncached_lookup(index, prompts[i % 32]))  # noqa: B023 - called before the next iteration
            again = rate(lambda i: index.prefixes(prompts[i % 32]))  # noqa: B023 - called before the next iteration
            print(f"  {workers:4} workers {blocks:5} blocks  {1e6 / anew:7.1f} us {1e6 / again:7.1f} us")


def print_events() -> None:
    generator = random.Random(SEED)
    index, bits = holder_index(64)
    runs = [[generator.getrandbits(64) for _ in range(64)] for _ in range(4000)]
    print_rates(
        runs,
        ("stored, new", lambda i: index.store(bits[i % 64], runs[i])),
        ("stored by a second worker", lambda i: index.store(bits[(i + 1) % 64], runs[i])),
        ("removed by the first", lambda i: index.remove(bits[i % 64], runs[i][::-1])),
        ("removed by the last", lambda i: index.remove(bits[(i + 1) % 64], runs[i][::-1])),
    )


def print_lazy_events() -> None:
    """Prints the cost of events for pending runs: without lookups, and with one lookup before each removal."""
    generator = random.Random(SEED)
    index = LazyIndex()
    for bit in range(64):
        index.add_holder(bit)
    runs = [[generator.getrandbits(64) for _ in range(64)] for _ in range(4000)]
    stored = (
        ("stored, new", lambda i: index.store_lazily(i % 64, runs[i])),
        ("stored by a second worker", lambda i: index.store_lazily((i + 1) % 64, runs[i])),
    )
    removed = (
        ("removed by the first", lambda i: index.remove(i % 64, runs[i][::-1])),
        ("removed by the last", lambda i: index.remove((i + 1) % 64, runs[i][::-1])),
    )
    print_rates(runs, *stored, *removed)
    print("  with one lookup:")
    print_rates(runs, *stored, ("asked, both workers' entered", lambda i: index.prefixes(runs[i])), *removed)


def print_rates(runs: Sequence[Sequence[int]], *rows: tuple[str, Callable[[int], object]]) -> None:
    total = sum(map(len, runs))
    for name, action in rows:
        started = time.process_time()
        for i in range(len(runs)):
            action(i)
        print(f"  {name:28} {total / (time.process_time() - started) / 1e6:6.2f} M blocks/s")


def print_predicted() -> None:
    """Prints the cost of placements of prompts that share a prefix, on 64 workers."""
    generator = random.Random(SEED)
    for blocks in (128, 2048):
        index = PredictedIndex(blocks_max=10_000_000)
        for bit in range(64):
            index.add_holder(bit)
        head = [generator.getrandbits(64) for _ in range(blocks - 16)]
        prompts = [tuple(head + [generator.getrandbits(64) for _ in range(16)]) for _ in range(2000)]
        lifetime = Lifetime(ttl_s=1e9, placements_max=1000)

        def add(i: int) -> None:
            index.add(i % 64, prompts[i % 2000], now=0.0, lifetime=lifetime)  # noqa: B023 - called before the next iteration

        added = rate(add)
        asked = rate(lambda i: index.prefixes(prompts[i % 2000]))  # noqa: B023 - called before the next iteration
        print(f"  {blocks:5} blocks  placed {1e6 / added:5.1f} us  asked {1e6 / asked:5.1f} us")


def print_memory() -> None:
    """Prints bytes per distinct block. A dictionary that has just grown has the most unused space."""
    for holders, blocks, run_blocks, has_waiting in (
        (1, 1_000_000, 100, False),
        (1, 1_400_000, 100, False),
        (512, 100_000, 100, False),
        (512, 5_000, 1, False),
        (1, 1_000_000, 100, True),
        (2, 1_000_000, 100, True),
        (2, 1_000_000, 8, True),
    ):
        index = LazyIndex(pending_blocks_max=blocks)
        for bit in range(holders):
            index.add_holder(bit)
        generator = random.Random(SEED)
        tracemalloc.start()
        for _ in range(blocks // run_blocks):
            run = [generator.getrandbits(64) for _ in range(run_blocks)]
            for bit in range(holders):
                # As in a router: each worker's message has its own objects for the same hashes.
                own = [block ^ 0 for block in run] if has_waiting else run
                (index.store_lazily if has_waiting else index.store)(bit, own)
        bytes_per_block = tracemalloc.get_traced_memory()[0] / blocks
        tracemalloc.stop()
        print(
            f"  {blocks:9,} blocks held by {holders:3}, reported {run_blocks:3} at a time{', pending' if has_waiting else ''}: "
            f"{bytes_per_block:.0f} bytes a block"
        )


def print_beside_dynamo(directory: Path) -> None:
    """Prints the time of a lookup of every worker's depth, alternating kvmesh and Dynamo."""
    command = [str(directory / "bin" / "python"), "-P", str(Path(__file__).with_name("dynamo_radix.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for workers, blocks in (
            (8, 32),
            (8, 128),
            (8, 512),
            (8, 2048),
            (64, 32),
            (64, 128),
            (64, 512),
            (64, 2048),
            (512, 128),
        ):
            prompts, depths = shared_prefixes(workers, blocks, 8)
            held = [list(enumerate(each)) for each in depths]
            process.stdin.write(json.dumps({"prompts": prompts, "held": held}) + "\n")
            process.stdin.flush()
            theirs_us = json.loads(process.stdout.readline())["lookup_us"]
            index, _ = fleet_with_shared_prefixes(workers, blocks, 8)
            ours_us = 1e6 / rate(
                lambda i: tokens_by_bit(uncached_lookup(index, prompts[i % 8]), BLOCK_SIZE, workers // 8 + 1),  # noqa: B023 - see above
            )
            print(f"  {workers:4} workers {blocks:5} blocks  ours {ours_us:6.1f} us  RadixTree {theirs_us:6.1f} us")
        process.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dynamo", type=Path, help="virtual environment with Dynamo")
    arguments = parser.parse_args()
    if arguments.dynamo and not (arguments.dynamo / "bin" / "python").exists():
        parser.error(f"--dynamo: {arguments.dynamo} is not a virtual environment")
    print(f"Python {sys.version.split()[0]}, times are CPU time of all threads")
    print_lookups()
    print("events, 64 workers, runs of 64 blocks")
    print_events()
    print("the same for blocks that no request looks up")
    print_lazy_events()
    print("own placements")
    print_predicted()
    print("memory")
    print_memory()
    if arguments.dynamo:
        print("compared with Dynamo: lookup of every worker's depth")
        print_beside_dynamo(arguments.dynamo)


if __name__ == "__main__":
    main()
