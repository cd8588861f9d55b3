"""Two routers on virtual time: how far they differ, what a new one knows, and that nothing is lost whatever happens to them."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from services.router.index.kv_feed import Trust
from services.router.workers.reservations import Reservation
from services.simulation.router import SimulatedRouter
from services.simulation.world import Latencies
from tests.simulation.meshes import MESHES
from tests.simulation.runs import run
from tests.simulation.scripted_mesh import ScriptedMesh

SAMPLE_S = 0.001
ON_THE_WAY_S = Latencies().least_s + Latencies().spread_s + SAMPLE_S
"""What the bound on the time by which a router is behind has beside the interval: one crossing, and the grain of timers."""

Weight = tuple[int, int, int]
"""Requests, prompt tokens to compute, KV blocks."""


@dataclass(slots=True, eq=False)
class Changes:
    """Stands between a book and its listener, and notes when how much changed."""

    router: SimulatedRouter
    newest: deque[tuple[float, Weight]] = field(default_factory=deque)
    placed: int = 0

    def watch(self) -> "Changes":
        self.router.core.book.listener = self
        return self

    def on_added(self, reservation: Reservation) -> None:
        self.placed += 1
        self._note(weight_of(reservation))
        self.router.replica.on_added(reservation)

    def on_adopted(self, reservation: Reservation) -> None:
        self.router.replica.on_adopted(reservation)

    def on_prefilled(self, reservation: Reservation) -> None:
        self._note((1, reservation.uncached_tokens, 0))
        self.router.replica.on_prefilled(reservation)

    def on_settled(self, reservation: Reservation) -> None:
        self._note(weight_of(reservation))
        self.router.replica.on_settled(reservation)

    def within(self, since: float) -> Weight:
        """The sum of what changed since then."""
        while self.newest and self.newest[0][0] < since:
            self.newest.popleft()
        weights = [weight for _, weight in self.newest]
        return tuple(map(sum, zip(*weights, strict=True))) if weights else (0, 0, 0)  # type: ignore[return-value]

    def _note(self, weight: Weight) -> None:
        self.newest.append((self.router.now(), weight))


def weight_of(reservation: Reservation) -> Weight:
    """What it counts on its workers, all together."""
    legs = reservation.choices + (reservation.prefill is not None)
    return legs, reservation.uncached_tokens, reservation.kv_blocks


def in_flight(router: SimulatedRouter) -> dict[str, Weight]:
    """Per worker, as the router sees it."""
    return {
        target.worker.worker_id: (
            target.requests_in_flight,
            target.prompt_tokens_in_flight,
            target.kv_blocks_in_flight,
        )
        for target in router.core.fleet.targets()
    }


def difference(one: SimulatedRouter, other: SimulatedRouter) -> Weight:
    """Summed over the workers."""
    ones, others = in_flight(one), in_flight(other)
    assert set(ones) == set(others)
    differences = [tuple(abs(a - b) for a, b in zip(ones[name], others[name], strict=True)) for name in ones]
    return tuple(map(sum, zip(*differences, strict=True)))  # type: ignore[return-value]


@pytest.mark.parametrize(("shape", "load"), [("two-routers", "dense"), ("two-quick-routers", "calm")])
def test_routers_differ_by_what_happened_within_the_interval(shape: str, load: str) -> None:
    """At every moment of the load; so when nothing has happened for that long they count the same, to the last token."""
    behind_s = MESHES[shape].router.sync.interval_s + ON_THE_WAY_S
    samples: list[Weight] = []
    still = 0
    watched: list[Changes] = []

    async def sample(mesh: ScriptedMesh) -> None:
        nonlocal still
        one, other = mesh.routers.values()
        changes = [Changes(router).watch() for router in (one, other)]
        watched.extend(changes)
        while not mesh.ledgers or any(not ledger.outcome for ledger in mesh.ledgers.values()):
            await mesh.world.clock.sleep(SAMPLE_S)
            since = mesh.now_s - behind_s
            both = [each.within(since) for each in changes]
            bound = tuple(a + b for a, b in zip(*both, strict=True))
            differs = difference(one, other)
            assert all(a <= b for a, b in zip(differs, bound, strict=True)), f"{mesh.now_s}: {differs} > {bound}"
            still += bound == (0, 0, 0) and len(one.core.book) > 0
            samples.append(differs)

    report = run(11, 300, mesh=shape, load=load, script=sample).check()
    assert report.outcomes["answered"] + report.outcomes["cancelled"] == 300
    assert min(each.placed for each in watched) > 100  # Both place.
    assert max(requests for requests, _, _ in samples) > 2  # They do differ,
    if load == "calm":
        assert still > 10  # and there were moments with work in flight at which they had to agree.


def test_a_router_that_comes_back_knows_everything_before_it_takes_requests() -> None:
    """Its index is exact and what is in flight is counted when the registry lists it as passing."""
    seen: list[tuple[int, int]] = []

    async def restart(mesh: ScriptedMesh) -> None:
        await mesh.world.clock.sleep(1.5)
        await mesh.kill("router-0")
        await mesh.world.clock.sleep(0.5)
        router, other = await mesh.restart_router("router-0"), mesh.routers["router-1"]
        feeds = [worker.feed for worker in router.core.fleet.workers.values()]
        assert len(feeds) == 4 and all(feed is not None and feed.trust is Trust.EXACT for feed in feeds)
        seen.append((len(router.core.book), len(other.core.book)))
        assert not router.core._placements
        await mesh.world.clock.sleep(2.0)
        assert router.core._placements  # The frontend has found it again.

    report = run(12, 300, mesh="two-routers", load="dense", script=restart).check()
    assert report.outcomes["answered"] + report.outcomes["cancelled"] == 300
    [(known, there)] = seen
    assert there > 5
    assert abs(known - there) <= 4


@pytest.mark.parametrize(("shape", "seed"), [("two-routers", 1), ("two-routers", 2), ("four-routers", 1)])
def test_routers_die_hang_and_come_back(shape: str, seed: int) -> None:
    """No request notices, also not that streams move where there are more routers; in the end all hold nothing and every index is exact."""
    report = run(seed, 200, mesh=shape, faults="routers").check()
    workers_died = any(" kill decode" in line or " kill prefill" in line for line in report.lines)
    assert set(report.outcomes) <= {"answered", "cancelled", *(("worker_lost",) if workers_died else ())}
    if seed == 1:
        assert run(seed, 200, mesh=shape, faults="routers").hash == report.hash
