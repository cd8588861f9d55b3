"""Several routers in one replay: requests go to them in rotation, and they share state with the delays of a mesh.

Simultaneous requests at two routers are placed independently. The conversation trace has many: its times are multiples of 3 s, so ten requests
arrive at once.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from bench.policies.dynamo_cost import DynamoCostPolicy
from kvmesh.core import KvEvent
from services.router.core_settings import CoreSettings, SyncSettings
from services.router.replicas.peer_reservations import PeerReservations, PeerSession
from services.whatif.engine import Job, ReplayEngine
from services.whatif.placers import RouterPlacer, SimulatedPlacer, Spot

if TYPE_CHECKING:
    from services.whatif.mesh import Replay

MESSAGE_S = 0.001
"""Time of one message between two routers."""


def make_placer(replay: "Replay", policy: str) -> SimulatedPlacer:
    """Returns the placer for the number of routers in the shape."""
    return _router(replay, policy) if replay.shape.routers == 1 else RoutersPlacer(replay, policy)


def _router(replay: "Replay", policy: str, router_id: str = "replay") -> RouterPlacer:
    if policy == "dynamo_cost":
        return RouterPlacer(replay, CoreSettings(), policy=DynamoCostPolicy, router_id=router_id)
    return RouterPlacer(replay, CoreSettings(policy=policy), router_id=router_id)


class RoutersPlacer:
    """Several routers. A request's number selects the router that places it and gets its reports."""

    def __init__(self, replay: "Replay", policy: str) -> None:
        self._replay = replay
        self._placers = [_router(replay, policy, f"router-{i}") for i in range(replay.shape.routers)]
        peers = [PeerReservations(placer.core, SyncSettings()) for placer in self._placers]
        for one, other in combinations(peers, 2):
            ends = ((one, one.open_session()), (other, other.open_session()))
            for (sender, outgoing), (receiver, incoming) in (ends, ends[::-1]):
                self._connect(sender, outgoing, receiver, incoming=incoming)

    def place(self, job: Job) -> Spot | None:
        return self._of(job).place(job)

    def on_events(self, engine: ReplayEngine, events: Sequence[KvEvent]) -> None:
        for placer in self._placers:
            placer.on_events(engine, events)

    def on_load(self, engine: ReplayEngine) -> None:
        for placer in self._placers:
            placer.on_load(engine)

    def on_prefilled(self, job: Job) -> None:
        self._of(job).on_prefilled(job)

    def on_first_token(self, job: Job) -> None:
        self._of(job).on_first_token(job)

    def on_done(self, job: Job) -> None:
        self._of(job).on_done(job)

    def _of(self, job: Job) -> RouterPlacer:
        return self._placers[job.ask_id % len(self._placers)]

    def _connect(
        self, sender: PeerReservations, outgoing: PeerSession, receiver: PeerReservations, *, incoming: PeerSession
    ) -> None:
        """Sends one router's state to another: an empty snapshot, then the changes every `sync_interval_s`."""
        replay, interval_s = self._replay, self._replay.shape.sync_interval_s
        next_s = replay.now_s

        def send() -> None:
            nonlocal next_s
            next_s = replay.now_s + interval_s
            news = sender.next_message(outgoing, now=replay.now_s)
            replay.at(replay.now_s + MESSAGE_S, lambda: receiver.on_message(incoming, news, now=replay.now_s))
            if outgoing.updates:
                replay.at(next_s, send)

        def send_first() -> None:
            if len(outgoing.updates) == 1:
                replay.at(max(replay.now_s, next_s), send)

        send()
        outgoing.updates.on_change = send_first
