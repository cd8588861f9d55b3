"""Three routers with failures between them and of their streams to frontends: finally all count the same requests, and no finished ones.

A request may be missing only if its only router died, or lost its frontend's stream, before it sent an update.
"""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core import ReportKind
from tests.unit.router_replicas import GRACE_S, Routers

NAMES = ("a", "b", "c")
OPERATIONS = ("place", "prefill", "finish", "say", "say", "sync", "cut", "connect", "kill", "start", "move", "later")
Steps = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1000)), max_size=60)


@dataclass(eq=False)
class Request:
    """A request as its frontend knows it."""

    number: int
    reservation_id: str
    reports_to: str
    """The router that gets its reports."""

    is_moved: bool = False
    is_prefilled: bool = False


class RoutersWithFrontend:
    """Routers, and one frontend with a stream to each."""

    def __init__(self) -> None:
        self.routers = Routers(*NAMES)
        self.in_flight: list[Request] = []
        self.may_be_missing: set[str] = set()

    def do(self, operation: str, choice: int) -> None:
        getattr(self, f"_{operation}")(choice)

    def _place(self, choice: int) -> None:
        name = self._alive(choice)
        number, placement = self.routers.place(name)
        self.in_flight.append(Request(number, placement.reservation_id, name))

    def _prefill(self, choice: int) -> None:
        request = self._request(choice)
        if request is not None:
            request.is_prefilled = True
            self._report(request, ReportKind.PREFILLED)

    def _finish(self, choice: int) -> None:
        request = self._request(choice)
        if request is not None:
            self.in_flight.remove(request)
            self._report(request, ReportKind.FINISHED)

    def _report(self, request: Request, kind: ReportKind) -> None:
        named = request.reservation_id if request.is_moved else ""
        self.routers.report(request.reports_to, request.number, kind, reservation_id=named)

    def _say(self, choice: int) -> None:
        if self.routers.streams:
            stream = self.routers.streams[choice % len(self.routers.streams)]
            self.routers.send_update(stream, list(stream.ends)[choice // 7 % 2])

    def _sync(self, choice: int) -> None:
        self.routers.sync()

    def _cut(self, choice: int) -> None:
        if self.routers.streams:
            self.routers.cut(self.routers.streams[choice % len(self.routers.streams)])

    def _connect(self, choice: int) -> None:
        missing = self._unconnected()
        if missing:
            self.routers.connect(*missing[choice % len(missing)])

    def _kill(self, choice: int) -> None:
        if len(self.routers.cores) > 1:
            name = self._alive(choice)
            self.routers.kill(name)
            self._adopt_elsewhere(name, choice)

    def _start(self, choice: int) -> None:
        dead = [name for name in NAMES if name not in self.routers.cores]
        if dead:
            self.routers.start(dead[choice % len(dead)])

    def _move(self, choice: int) -> None:
        """Breaks and restores the frontend's stream to a running router."""
        name = self._alive(choice)
        self.routers.cores[name].on_stream_ended("f", now=self.routers.now)
        self._adopt_elsewhere(name, choice)

    def _later(self, choice: int) -> None:
        self.routers.sync()  # Sending over a connected stream takes milliseconds.
        self.routers.advance((0.1, 3.0, GRACE_S + 1)[choice % 3])

    def _adopt_elsewhere(self, name: str, choice: int) -> None:
        others = [other for other in self.routers.cores if other != name] or [name]
        other = others[choice // 3 % len(others)]
        for request in self.in_flight:
            if request.reports_to == name:
                if self.routers.cores[other].book.get(request.reservation_id) is None:
                    self.may_be_missing.add(request.reservation_id)
                request.reports_to, request.is_moved = other, True
                self._report(request, ReportKind.PREFILLED if request.is_prefilled else ReportKind.PROGRESS)

    def settle_down(self) -> None:
        """Restores all streams, and lets some seconds pass without further events."""
        for one, other in self._unconnected():
            self.routers.connect(one, other)
        self.routers.sync()
        for _ in range(3):
            self.routers.advance(GRACE_S + 1)
            self.routers.sync()

    def _alive(self, choice: int) -> str:
        return list(self.routers.cores)[choice % len(self.routers.cores)]

    def _request(self, choice: int) -> Request | None:
        return self.in_flight[choice % len(self.in_flight)] if self.in_flight else None

    def _unconnected(self) -> list[tuple[str, str]]:
        alive = [name for name in NAMES if name in self.routers.cores]
        connected = {frozenset(stream.ends) for stream in self.routers.streams}
        pairs = [(one, other) for one in alive for other in alive if one < other]
        return [pair for pair in pairs if frozenset(pair) not in connected]


@settings(max_examples=120, deadline=None)
@given(Steps)
def test_all_routers_count_the_same_in_the_end(steps: list[tuple[str, int]]) -> None:
    rig = RoutersWithFrontend()
    for operation, choice in steps:
        rig.do(operation, choice)
    rig.settle_down()
    expected = {request.reservation_id for request in rig.in_flight}
    for name, core in rig.routers.cores.items():
        counted = {reservation.reservation_id for reservation in core.book}
        assert counted <= expected, f"{name} counts finished requests"
        assert expected - counted <= rig.may_be_missing, f"{name} misses requests in flight"
        assert counted == {reservation.reservation_id for reservation in next(iter(rig.routers.cores.values())).book}
    sums = [rig.routers.sums(name) for name in rig.routers.cores]
    assert all(each == sums[0] for each in sums)
    for _ in list(rig.in_flight):
        rig.do("finish", 0)
    rig.routers.sync()
    for name in rig.routers.cores:
        assert not any(any(sums) for sums in rig.routers.sums(name).values())


@given(Steps)
@settings(max_examples=100, deadline=None)
def test_no_request_is_missing_without_failures(steps: list[tuple[str, int]]) -> None:
    """Routers differ only by the updates that were not sent yet."""
    rig = RoutersWithFrontend()
    for one, other in rig._unconnected():
        rig.routers.connect(one, other)
    for operation, choice in steps:
        if operation in ("place", "prefill", "finish", "say"):
            rig.do(operation, choice)
    rig.routers.sync()
    sums = [rig.routers.sums(name) for name in NAMES]
    assert sums[0] == sums[1] == sums[2]
    assert len(rig.routers.cores["a"].book) == len(rig.in_flight)
