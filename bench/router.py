"""Measures the placement rate of a router core: `python -m bench.router [--workers 8,64,512] [--blocks 32,...]`.

Runs in one process and one thread, without a network. A decision is one call of `RouterCore.ask`: lookup, scoring, reservation, history. Half of
the workers are prefill workers. The index has a million blocks. All workers hold a prefix of every prompt, with eight different lengths. Another
column is the cost of the request's reports. Times are CPU time of this process, median of the rounds.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmesh.core import (
    Ask,
    Capabilities,
    Handoff,
    KvBatch,
    LoadRecord,
    ModelCard,
    Report,
    ReportKind,
    Role,
    WorkerDescription,
    WorkerRef,
)
from kvmesh.lifecycle.process import collect_rarely
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings

SEED = 7
BLOCK = 16
BLOCKS_TOTAL = 1_000_000
PROMPTS = 32
IN_FLIGHT_PER_WORKER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One row: seconds per decision, and for the reports of one request."""

    workers: int
    blocks: int
    best_tenth_cpu_s: float
    decide_cpu_s: float
    decide_wall_s: float
    report_cpu_s: float
    match_cpu_s: float


def describe(name: str, role: Role) -> WorkerDescription:
    return WorkerDescription(
        worker=WorkerRef(worker_id=name, address=f"10.0.0.{name[1:]}:1", epoch=1),
        role=role,
        model=ModelCard(name="demo", source="demo", context_tokens_max=1 << 20, vocabulary_size=100),
        capabilities=Capabilities(
            engine="simulated", engine_version="1", handoffs=(Handoff.SEQUENTIAL,), features=("kv_events",)
        ),
        kv_compatibility_hash="same",
        block_size_tokens=BLOCK,
        kv_blocks_total=1 << 20,
    )


def fleet(workers: int, prefills: int, policy: str) -> RouterCore:
    core = RouterCore(CoreSettings(policy=policy), router_id="bench", generator=random.Random(SEED))
    for i in range(workers):
        role = Role.PREFILL if i < prefills else Role.DECODE
        name = f"{role.value[0]}{i}"
        worker = core.fleet.register(
            name, address=f"10.0.0.{i}:1", role=role, labels={}, is_critical=False, is_draining=False
        )
        core.fleet.describe(worker, describe(name, role))
        assert worker.feed is not None
        worker.feed.apply(KvBatch(epoch=1, sequence=0, is_snapshot=True))
        core.fleet.on_load_record(worker, LoadRecord(worker_id=name, epoch=1, running_requests_max=256), now=0.0)
        core.fleet.connected(worker)
    return core


def make_prompts(blocks: int) -> list[list[int]]:
    """Returns the block hashes of the prompts."""
    generator = random.Random(SEED)
    return [[generator.getrandbits(64) for _ in range(blocks)] for _ in range(PROMPTS)]


def fill(core: RouterCore, blocks: int, depths_each: int) -> list[list[int]]:
    """Indexes a million blocks. Every worker holds a prefix of each prompt. The prefixes have `depths_each` different lengths."""
    generator = random.Random(SEED + 1)
    bits = [target.bits[target.rank] for target in core.fleet.targets()]
    prompts = make_prompts(blocks)
    for prompt in prompts:
        depths = [generator.randint(1, blocks) for _ in range(depths_each)]
        for bit in bits:
            core.index.device.store(bit, prompt[: generator.choice(depths)])
    while len(core.index.device) < BLOCKS_TOTAL:
        core.index.device.store(generator.choice(bits), [generator.getrandbits(64) for _ in range(1000)])
    return prompts


def clear_lookup_caches(core: RouterCore) -> None:
    """Clears the lookup caches."""
    core.index.device._lookup_cache.clear()
    core.placer.cached_tokens._cache.clear()


def measure(
    core: RouterCore,
    prompts: Sequence[Sequence[int]],
    workers: int,
    *,
    for_s: float,
    now: float = 0.0,
    is_fresh: bool = False,
) -> Rate:
    """Measures at half load: the router's clock advances by twice the time that a prompt occupies one prefill worker."""
    asks = [
        Ask(
            request_id=f"r{i}",
            model="demo",
            prompt_tokens=len(prompt) * BLOCK + 5,
            block_hashes=prompt,
            block_size_tokens=BLOCK,
            expected_output_tokens=128,
        )
        for i, prompt in enumerate(prompts)
    ]
    computing = sum(target.worker.role is Role.PREFILL for target in core.fleet.targets()) or workers
    pace_s = 2 * (0.004 + 0.00004 * asks[0].prompt_tokens) / computing
    in_flight, batch = IN_FLIGHT_PER_WORKER * workers, 64
    number = 0
    rounds: list[tuple[float, float, float]] = []
    spent_s = 0.0
    while spent_s < for_s or len(rounds) < 8 + 2 * in_flight // batch:
        wall, cpu = time.perf_counter(), time.process_time()
        for i in range(number, number + batch):
            if is_fresh:
                clear_lookup_caches(core)
            core.ask("f", i, asks[i % PROMPTS], now=now, wall=now)
            now += pace_s
        asked_cpu, asked_wall = time.process_time() - cpu, time.perf_counter() - wall
        cpu = time.process_time()
        for i in range(number, number + batch):
            # Half of the requests in flight are prefilled at once; the oldest requests finish.
            core.report("f", i, Report(kind=ReportKind.PREFILLED, elapsed_s=0.0))
            core.report("f", i - in_flight, Report(kind=ReportKind.FINISHED, elapsed_s=0.0))
        rounds.append((asked_cpu, asked_wall, time.process_time() - cpu))
        number += batch
        spent_s += asked_wall
    matches = 2000
    cpu = time.process_time()
    for i in range(matches):
        if is_fresh:
            clear_lookup_caches(core)
        core.index.device.prefixes(prompts[i % PROMPTS])
    match_cpu = (time.process_time() - cpu) / matches
    # The first rounds fill the fleet. Other processes affect CPU caches and clock: the median shows a typical round, the best tenth the cost of
    # the
    # code.
    columns = [sorted(column) for column in zip(*rounds[in_flight // batch :], strict=True)]
    middle = [statistics.median(column) / batch for column in columns]
    best_tenth_cpu = columns[0][len(columns[0]) // 10] / batch
    return Rate(
        workers=workers,
        blocks=len(prompts[0]),
        best_tenth_cpu_s=best_tenth_cpu,
        decide_cpu_s=middle[0],
        decide_wall_s=middle[1],
        report_cpu_s=middle[2],
        match_cpu_s=match_cpu,
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=numbers, default=[8, 64, 512])
    parser.add_argument("--blocks", type=numbers, default=[32, 128, 512, 2048])
    parser.add_argument(
        "--depths", type=int, default=8, help="number of different prefix lengths per prompt; 2 is typical"
    )
    parser.add_argument("--policy", default="kv")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--fresh", action="store_true", help="clear the lookup cache before each request")
    parser.add_argument("--together", action="store_true", help="no prefill workers: decode workers compute the prompt")
    parser.add_argument("--grpc", action="store_true", help="measure a router process through gRPC instead")
    parser.add_argument("--rate", type=float, default=2000.0, help="placement requests per second through gRPC")
    parser.add_argument(
        "--arrivals", default="even,random", help="arrivals through gRPC: even (one each 1/rate s), random (Poisson)"
    )
    parser.add_argument("--frontends", type=int, default=1, help="frontend links through gRPC")
    parser.add_argument("--dynamo", type=Path, help="virtual environment with Dynamo: compare with its router instead")
    parser.add_argument("--before", metavar="COMMIT", help="compare with an earlier commit instead, in alternation")
    parser.add_argument("--turns", type=int, default=5, help="number of processes per tree and row, with --before")
    options = parser.parse_args()
    if options.before:
        from bench import router_before

        router_before.main(
            options.before,
            workers=options.workers,
            blocks=options.blocks,
            depths=options.depths,
            for_s=options.seconds,
            turns=options.turns,
        )
        return
    # Imported here, because these modules import this one.
    if options.dynamo:
        if not (options.dynamo / "bin" / "python").exists():
            parser.error(f"--dynamo: {options.dynamo} is not a virtual environment")
        from bench import router_beside

        collect_rarely()
        router_beside.main(
            options.workers, options.blocks, options.depths, for_s=options.seconds, directory=options.dynamo
        )
        return
    if options.grpc:
        from bench import router_grpc
        from bench.pacing import Arrivals

        arrivals = [Arrivals(word) for word in options.arrivals.split(",")]
        router_grpc.main(
            options.workers,
            options.blocks,
            options.depths,
            rate=options.rate,
            for_s=options.seconds,
            arrivals=arrivals,
            frontends=options.frontends,
        )
        return
    collect_rarely()
    print(
        f"Python {sys.version.split()[0]}, policy {options.policy}; one core, in process, {BLOCKS_TOTAL:,} blocks indexed"
    )
    print("workers blocks | decisions per CPU-s: best tenth, median | us CPU  us wall  match alone  reports")
    for workers in options.workers:
        for blocks in options.blocks:
            core = fleet(workers, 0 if options.together else workers // 2, options.policy)
            prompts = fill(core, blocks, options.depths)
            rate = measure(core, prompts, workers, for_s=options.seconds, is_fresh=options.fresh)
            print(
                f"{workers:7} {blocks:6} | {1 / rate.best_tenth_cpu_s:31,.0f} {1 / rate.decide_cpu_s:7,.0f} |"
                f" {1e6 * rate.decide_cpu_s:6.1f} {1e6 * rate.decide_wall_s:8.1f}"
                f" {1e6 * rate.match_cpu_s:12.1f} {1e6 * rate.report_cpu_s:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
