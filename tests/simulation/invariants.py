"""What holds in a mesh that has been idle for a lease."""

from collections.abc import Mapping

from services.router.index.kv_feed import Trust
from tests.index_checks import blocks_of
from tests.simulation.frontend import SimulatedFrontend
from tests.simulation.router import SimulatedRouter
from tests.simulation.worker import SimulatedWorker


def worker_problems(worker: SimulatedWorker) -> list[str]:
    """Every block is free or cached, nothing is held or leased, no leg is left; a drained worker took nothing new."""
    counts, statistics = worker.engine.scheduler.pool.counts(), worker.worker.statistics()
    total = worker.engine.scheduler.pool.total
    problems: list[str] = []
    if counts.free + counts.cached != total or counts.held or counts.leased:
        problems.append(f"blocks are not all free or cached: {counts} of {total}")
    legs = len(worker.engine.scheduler._legs)
    if legs or statistics.legs:
        problems.append(f"legs left: {legs} in the engine, {statistics.legs} in the worker")
    if statistics.leases:
        problems.append(f"{statistics.leases} leases left")
    if statistics.kv_blocks_announced != len(worker.engine.scheduler.pool.cached_names()):
        problems.append("what is announced is not what is cached")
    if worker.accepted_at_drain not in (None, worker.engine.accepted):
        problems.append("took a request after its drain mark")
    return [f"{worker.worker_id}: {problem}" for problem in problems]


def router_problems(router: SimulatedRouter, workers: Mapping[str, SimulatedWorker]) -> list[str]:
    """No reservation is left, and the index is the union of the workers' caches."""
    core = router.core
    problems: list[str] = []
    if len(core.book):
        problems.append(f"{len(core.book)} reservations left")
    if core.queue.requests or core.queue.subqueues or router.has_waiting:
        problems.append(f"{core.queue.requests} asks wait in {len(core.queue.subqueues)} lanes")
    for target in core.fleet.targets():
        in_flight = (target.requests_in_flight, target.prompt_tokens_in_flight, target.kv_blocks_in_flight)
        if any(in_flight):
            problems.append(f"{target.worker.worker_id} has {in_flight} in flight")
    union: set[int] = set()
    for worker_id, worker in workers.items():
        cached = worker.engine.scheduler.pool.cached_names()
        union |= cached
        known = core.fleet.workers.get(worker_id)
        feed = known.feed if known is not None else None
        if feed is None or feed.trust is not Trust.EXACT:
            problems.append(f"the index of {worker_id} is not exact")
        elif (listed := blocks_of(core.index.device, feed.bits[0])) != cached:
            problems.append(f"{worker_id}: {len(listed - cached)} blocks too many, {len(cached - listed)} too few")
    if set(core.fleet.workers) != set(workers):
        problems.append(f"knows {sorted(core.fleet.workers)}, there are {sorted(workers)}")
    strangers = set(core.index.device.holders) - union
    if strangers:
        problems.append(f"{len(strangers)} blocks that nobody has")
    return [f"{router.router_id}: {problem}" for problem in problems]


def frontend_problems(frontend: SimulatedFrontend) -> list[str]:
    """No request is in flight and no leg is on a link."""
    problems: list[str] = []
    if frontend.pipeline.in_flight:
        problems.append(f"{frontend.pipeline.in_flight} requests in flight")
    if any(frontend.links.statistics().values()):
        problems.append(f"legs on links: {frontend.links.statistics()}")
    return [f"frontend: {problem}" for problem in problems]
