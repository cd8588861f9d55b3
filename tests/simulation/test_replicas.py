"""Two routers on virtual time: how far their states differ, what a new router knows, and that faults lose nothing."""

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
"""Added to the sync interval in the bound on a router's lag: one message, and the resolution of timers."""

Weight = tuple[int, int, int]
"""Requests, prompt tokens to compute, KV blocks."""


@dataclass(slots=True, eq=False)
class ChangeRecorder:
    """Sits between a reservation book and its listener, and records the time and amount of each change."""

    router: SimulatedRouter
    newest: deque[tuple[float, Weight]] = field(default_factory=deque)
    placed: int = 0

    def watch(self) -> "ChangeRecorder":
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
        """Returns the sum of the changes since then."""
        while self.newest and self.newest[0][0] < since:
            self.newest.popleft()
        weights = [weight for _, weight in self.newest]
        return tuple(map(sum, zip(*weights, strict=True))) if weights else (0, 0, 0)  # type: ignore[return-value]

    def _note(self, weight: Weight) -> None:
        self.newest.append((self.router.now(), weight))


def weight_of(reservation: Reservation) -> Weight:
    """Returns what a reservation counts on all its workers together."""
    legs = reservation.choices + (reservation.prefill is not None)
    return legs, reservation.uncached_tokens, reservation.kv_blocks


def in_flight(router: SimulatedRouter) -> dict[str, Weight]:
    """Returns the load per worker, as the router sees it."""
    return {
        target.worker.worker_id: (
            target.requests_in_flight,
            target.prompt_tokens_in_flight,
            target.kv_blocks_in_flight,
        )
        for target in router.core.fleet.targets()
    }


def difference(one: SimulatedRouter, other: SimulatedRouter) -> Weight:
    """Returns the difference between two routers, summed over the workers."""
    ones, others = in_flight(one), in_flight(other)
    assert set(ones) == set(others)
    differences = [tuple(abs(a - b) for a, b in zip(ones[name], others[name], strict=True)) for name in ones]
    return tuple(map(sum, zip(*differences, strict=True)))  # type: ignore[return-value]


@pytest.mark.parametrize(("shape", "load"), [("two-routers", "dense"), ("two-quick-routers", "calm")])
def test_routers_differ_by_what_happened_within_the_interval(shape: str, load: str) -> None:
    """At every moment, two routers differ at most by the changes within the interval. Without changes for that long, they agree to the last
    token."""
    behind_s = MESHES[shape].router.sync.interval_s + ON_THE_WAY_S
    samples: list[Weight] = []
    still = 0
    watched: list[ChangeRecorder] = []

    async def sample(mesh: ScriptedMesh) -> None:
        nonlocal still
        one, other = mesh.routers.values()
        changes = [ChangeRecorder(router).watch() for router in (one, other)]
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
    assert min(each.placed for each in watched) > 100  # Both routers placed requests.
    assert max(requests for requests, _, _ in samples) > 2  # The routers did differ.
    if load == "calm":
        assert still > 10  # There were moments with work in flight at which the routers had to agree.


def test_a_restarted_router_has_full_state_before_it_takes_requests() -> None:
    """When the registry lists the router as passing, its index is exact and it counts the requests in flight."""
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
        assert router.core._placements  # The frontend uses it again.

    report = run(12, 300, mesh="two-routers", load="dense", script=restart).check()
    assert report.outcomes["answered"] + report.outcomes["cancelled"] == 300
    [(known, there)] = seen
    assert there > 5
    assert abs(known - there) <= 4


@pytest.mark.parametrize(("shape", "seed"), [("two-routers", 1), ("two-routers", 2), ("four-routers", 1)])
def test_routers_die_hang_and_restart(shape: str, seed: int) -> None:
    """Requests are not affected, also when streams move between routers. In the end no router holds a reservation, and every index is exact."""
    report = run(seed, 200, mesh=shape, faults="routers").check()
    workers_died = any(" kill decode" in line or " kill prefill" in line for line in report.lines)
    assert set(report.outcomes) <= {"answered", "cancelled", *(("worker_lost",) if workers_died else ())}
    if seed == 1:
        assert run(seed, 200, mesh=shape, faults="routers").hash == report.hash
