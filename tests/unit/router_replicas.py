"""Routers that synchronise without real streams: a message is delivered when the test says so."""

from dataclasses import dataclass

from kvmesh.core import Placement, Report, ReportKind
from kvmesh.errors import LostError
from services.router.core import RouterCore
from services.router.core_settings import SyncSettings
from services.router.replicas.peer_reservations import PeerReservations, PeerSession
from tests.unit.router_fleets import ask, core, join

GRACE_S = 10.0
WORKERS = (("p1", "prefill"), ("d1", "decode"), ("d2", "decode"))
Sums = dict[str, tuple[int, int, int]]


@dataclass(eq=False)
class Stream:
    """A stream between two routers: the session that each has with the other."""

    ends: dict[str, PeerSession]

    def other(self, name: str) -> str:
        return next(end for end in self.ends if end != name)


class Routers:
    """Router cores with the same workers, and the streams between them."""

    def __init__(self, *names: str, settings: SyncSettings | None = None, workers=WORKERS) -> None:
        self.now = 100.0
        self._settings = settings or SyncSettings()
        self._runs = 0
        self.cores: dict[str, RouterCore] = {}
        self.replicas: dict[str, PeerReservations] = {}
        self.streams: list[Stream] = []
        self._asks = 0
        for name in names:
            self.start(name, workers)

    def start(self, name: str, workers=WORKERS) -> None:
        """Starts a new router process."""
        self._runs += 1
        router = self.cores[name] = core(router_id=name, run_id=f"run{self._runs}", reservation_grace_s=GRACE_S)
        for worker, role in workers:
            join(router, worker, role)
        self.replicas[name] = PeerReservations(router, self._settings)

    def connect(self, one: str, other: str) -> Stream:
        stream = Stream({name: self.replicas[name].open_session() for name in (one, other)})
        self.streams.append(stream)
        return stream

    def cut(self, stream: Stream) -> None:
        """Breaks the stream. Both routers close their session."""
        self.streams.remove(stream)
        for name, session in stream.ends.items():
            if name in self.replicas:
                self.replicas[name].close_session(session, now=self.now)

    def kill(self, name: str) -> None:
        """Ends a router process. Its peers close their sessions with it."""
        del self.replicas[name], self.cores[name]
        for stream in [stream for stream in self.streams if name in stream.ends]:
            self.cut(stream)

    def sync(self) -> None:
        """Delivers messages until no router has an update to send."""
        while any(
            session.updates or session.updates.is_due for stream in self.streams for session in stream.ends.values()
        ):
            for stream in list(self.streams):
                for name in stream.ends:
                    self.send_update(stream, name)

    def send_update(self, stream: Stream, name: str) -> None:
        """Delivers the next message of one router to its peer."""
        update = self.replicas[name].next_message(stream.ends[name], now=self.now)
        other = stream.other(name)
        try:
            self.replicas[other].on_message(stream.ends[other], update, now=self.now)
        except LostError:
            self.cut(stream)
            raise

    def place(
        self, name: str, *, frontend: str = "f", number: int = 0, tokens: int = 100, **options
    ) -> tuple[int, Placement]:
        self._asks += 1
        number = number or self._asks
        request = ask(f"r{number}", tokens=tokens, **options)
        placement = self.cores[name].ask(frontend, number, request, now=self.now, wall=0.0)
        assert isinstance(placement, Placement)
        return number, placement

    def report(
        self, name: str, number: int, kind: ReportKind, *, frontend: str = "f", reservation_id: str = "", **options
    ) -> None:
        note = Report(kind=kind, elapsed_s=0.01, reservation_id=reservation_id, **options)
        self.cores[name].report(frontend, number, note, now=self.now)

    def sums(self, name: str) -> Sums:
        """Returns requests, prompt tokens and KV blocks in flight on each worker, in the view of one router."""
        return {
            target.worker.worker_id: (
                target.requests_in_flight,
                target.prompt_tokens_in_flight,
                target.kv_blocks_in_flight,
            )
            for target in self.cores[name].fleet.targets()
        }

    def advance(self, seconds: float) -> None:
        """Advances the time, expires reservations and retries pending changes."""
        self.now += seconds
        for name in self.cores:
            list(self.cores[name].expire(now=self.now))
            self.replicas[name].retry_pending(now=self.now)
