"""Several routers in one replay: frontends ask them in turns, and they tell each other what they do, as late as in a mesh.

What arrives at the same moment at two of them is placed without knowing of each other. The conversation trace is hard on that: its
times are multiples of 3 s, so ten requests arrive at once.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from bench.replay.engine import Job, ReplayEngine
from bench.replay.placers import Placer, RouterPlacer, Spot
from kvmesh.core import KvEvent
from services.router.core_settings import SyncSettings
from services.router.replicas.peer_reservations import PeerReservations, PeerSession

if TYPE_CHECKING:
    from bench.replay.mesh import Replay

MESSAGE_S = 0.001
"""Time of one message between two routers."""


def make_placer(replay: "Replay", policy: str) -> Placer:
    """One router, or as many as the replay's shape says."""
    return RouterPlacer(replay, policy) if replay.shape.routers == 1 else RoutersPlacer(replay, policy)


class RoutersPlacer:
    """As many routers; a request's number says who places it, and to whom it is reported."""

    def __init__(self, replay: "Replay", policy: str) -> None:
        self._replay = replay
        self._placers = [RouterPlacer(replay, policy, f"router-{i}") for i in range(replay.shape.routers)]
        peers = [PeerReservations(placer.core, SyncSettings()) for placer in self._placers]
        for one, other in combinations(peers, 2):
            ends = ((one, one.open_session()), (other, other.open_session()))
            for (speaker, says), (hearer, hears) in (ends, ends[::-1]):
                self._join(speaker, says, hearer, hears)

    def place(self, job: Job) -> Spot | None:
        """See Placer."""
        return self._of(job).place(job)

    def on_events(self, engine: ReplayEngine, events: Sequence[KvEvent]) -> None:
        """See Placer."""
        for placer in self._placers:
            placer.on_events(engine, events)

    def on_load(self, engine: ReplayEngine) -> None:
        """See Placer."""
        for placer in self._placers:
            placer.on_load(engine)

    def on_prefilled(self, job: Job) -> None:
        """See Placer."""
        self._of(job).on_prefilled(job)

    def on_first_token(self, job: Job) -> None:
        """See Placer."""
        self._of(job).on_first_token(job)

    def on_done(self, job: Job) -> None:
        """See Placer."""
        self._of(job).on_done(job)

    def _of(self, job: Job) -> RouterPlacer:
        return self._placers[job.ask_id % len(self._placers)]

    def _join(self, speaker: PeerReservations, says: PeerSession, hearer: PeerReservations, hears: PeerSession) -> None:
        """The snapshot at once, of which nothing is in flight; then what changes, `sync_interval_s` after the message before."""
        replay, interval_s = self._replay, self._replay.shape.sync_interval_s
        next_s = replay.now_s

        def tell() -> None:
            nonlocal next_s
            next_s = replay.now_s + interval_s
            news = speaker.next_message(says, now=replay.now_s)
            replay.at(replay.now_s + MESSAGE_S, lambda: hearer.on_message(hears, news, now=replay.now_s))
            if says.updates:
                replay.at(next_s, tell)

        def tell_first() -> None:
            if len(says.updates) == 1:
                replay.at(max(replay.now_s, next_s), tell)

        tell()
        says.updates.on_change = tell_first
