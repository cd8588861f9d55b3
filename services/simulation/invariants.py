"""What holds in an idle mesh: nothing is left of any request."""

from collections.abc import Collection, Mapping

from services.router.index.holder_index import HolderIndex
from services.router.index.kv_feed import Trust
from services.router.index.lazy_index import LazyIndex
from services.simulation.frontend import SimulatedFrontend
from services.simulation.router import SimulatedRouter
from services.simulation.worker import SimulatedWorker


def blocks_of(index: HolderIndex, bit: int) -> set[int]:
    """Returns all cached blocks of a holder."""
    stored = {block for block, holders in index.holders.items() if holders & index._live & 1 << bit}
    if not isinstance(index, LazyIndex) or bit not in index._pending:
        return stored
    return stored.union(*[run.blocks for run in index._pending[bit].runs.values()])


def worker_problems(worker: SimulatedWorker, excused: Collection[str] = ()) -> list[str]:
    """Every block is free or cached, nothing is held or leased, no leg is left; a drained worker took nothing new.

    `excused`: handles that only the end of their lease can free.
    """
    counts, statistics = worker.engine.scheduler.pool.counts(), worker.worker.statistics()
    total = worker.engine.scheduler.pool.total
    problems: list[str] = []
    handles = [handle_id for handle_id in worker.engine.scheduler.leases.handle_ids() if handle_id not in excused]
    has_excused = statistics.leases > len(handles)
    if counts.held or (counts.leased and not has_excused) or counts.free + counts.cached + counts.leased != total:
        problems.append(f"blocks are not all free or cached: {counts} of {total}")
    if unaccounted := worker.engine.load().kv_blocks_unaccounted:
        problems.append(f"{unaccounted} blocks belong to no request and are not free")
    legs = len(worker.engine.scheduler._legs)
    if legs or statistics.legs:
        problems.append(f"legs left: {legs} in the engine, {statistics.legs} in the worker")
    problems += [f"handle {handle_id} of {worker.engine.handed_out.get(handle_id)} is left" for handle_id in handles]
    pulls = worker.engine._pulls
    if pulls is not None and (pulls._pulls or pulls._overdue or pulls._begun):
        problems.append(f"pulls left: {len(pulls._pulls)}, overdue {len(pulls._overdue)}, begun {len(pulls._begun)}")
    if worker.worker._legs._leg_ids or worker.worker._legs.links():
        problems.append("leg ids or slots left")
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
    for worker_id, health in core.health._health.items():
        if health.breaker._probes:
            problems.append(f"{worker_id}: its breaker waits for {len(health.breaker._probes)} probes")
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
    link = frontend.router_link
    if link._pending or link._in_flight or link._unsent:
        problems.append(
            f"link to the routers: {len(link._pending)} asks, {len(link._in_flight)} in flight, {len(link._unsent)} reports unsent"
        )
    if placed := frontend.local._in_flight.total():
        problems.append(f"{placed} requests counted that were placed without a router")
    return [f"{frontend.frontend_id}: {problem}" for problem in problems]
