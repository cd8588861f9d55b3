"""One Route stream of a frontend, from its hello until it breaks."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpc.aio import EOF, AioRpcError

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.core import Ask, Report, ReportKind
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.rpc.codec.router import REPORTS_MAX, TAKES_BATCHES, fill_ask, fill_report, to_ask, to_report
from kvmesh.rpc.status import from_rpc_error

URGENT = frozenset({ReportKind.FAILED, ReportKind.CANCELLED})
"""Not kept back: they take work away from a worker that may be in trouble."""


HASHES_MAX = 1 << 16
"""In a message with several asks: half a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When what is said is written.

    1. A report that is not urgent waits `report_delay_s` at most for others, or for an ask.
    2. An ask is written at once while less than `asks_ahead` of the stream are unanswered; else with others as soon as there are
       less, or after `ask_delay_s`. Both only where the router takes several in a message, `asks_max` at most.
    """

    report_delay_s: float
    ask_delay_s: float
    asks_ahead: int
    asks_max: int


class RouterStream:
    """Writes asks and reports, what has come together in one message. A turn of the loop is one message."""

    def __init__(self, call: Any, router_id: str, frontend_id: str, pace: Pace) -> None:
        self.router_id = router_id
        self.has_stood = False
        """The router said once that it hears."""
        self.is_up = False
        self.messages_sent = 0
        self._call = call
        self._is_writing = False
        self._pace = pace
        self._takes_batches = False
        hello = pb.Hello(frontend_id=frontend_id, takes_batches=True)
        self._hello: pb.RouteRequest | None = pb.RouteRequest(hello=hello)
        self._asks: dict[int, Ask] = {}
        self._unheard: set[int] = set()
        """Asks that are written and of which the router has said nothing."""
        self._reports: list[tuple[int, Report]] = []
        self._wakeup = asyncio.Event()
        self._wakeup.set()
        self._timer: asyncio.TimerHandle | None = None
        self._ask_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Asks and reports that wait to be written."""
        return len(self._asks) + len(self._reports)

    @property
    def has_unwritten(self) -> bool:
        """True until gRPC has everything that was said."""
        return self._is_writing or bool(self._asks or self._reports)

    def ask(self, ask_id: int, ask: Ask) -> None:
        self._asks[ask_id] = ask
        if len(self._unheard) < self._pace.asks_ahead or not self._takes_batches:
            self._wakeup.set()
        elif self._ask_timer is None:
            self._ask_timer = asyncio.get_running_loop().call_later(self._pace.ask_delay_s, self._wakeup.set)

    def heard(self, ask_ids: Iterable[int]) -> None:
        """The router has answered these, or said that they wait."""
        self._unheard.difference_update(ask_ids)
        if self._asks and len(self._unheard) < self._pace.asks_ahead:
            self._wakeup.set()

    def withdraw(self, ask_id: int) -> None:
        """Takes an ask back; one that was not written yet never was."""
        if self._asks.pop(ask_id, None) is None:
            self.report(ask_id, Report(kind=ReportKind.CANCELLED, elapsed_s=0.0))

    def report(self, ask_id: int, report: Report) -> None:
        self._reports.append((ask_id, report))
        if report.kind in URGENT or not self._pace.report_delay_s:
            self._wakeup.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pace.report_delay_s, self._wakeup.set)

    def give_up(self) -> None:
        """Ends the stream: `run` returns soon."""
        self._call.cancel()

    def take_reports(self) -> Sequence[tuple[int, Report]]:
        """What was not written before the stream broke."""
        reports, self._reports = self._reports, []
        return reports

    async def run(
        self,
        on_standing: Callable[["RouterStream"], None],
        on_message: Callable[["RouterStream", pb.RouteResponse], None],
        *,
        connect_timeout_s: float,
    ) -> MeshError:
        """Writes and reads until the stream breaks; gives what broke it.

        It stands when the router's initial metadata comes: a host that does not even refuse never sends any.
        """
        writing = asyncio.create_task(self._write(), name=f"route-write-{self.router_id}")
        try:
            async with asyncio.timeout(connect_timeout_s):
                metadata = await self._call.initial_metadata()
            if not self._call.done():  # A call that failed has initial metadata too.
                self.is_up = self.has_stood = True
                self._takes_batches = TAKES_BATCHES in metadata
                on_standing(self)
            while (message := await self._call.read()) is not EOF:
                on_message(self, message)
            return UnavailableError("the router ended the stream", reason="stream_ended")
        except AioRpcError as error:
            return from_rpc_error(error, where=self.router_id)
        except TimeoutError:
            return UnavailableError("the router did not say that it hears", reason="router_silent")
        except asyncio.CancelledError:
            if not self._call.cancelled() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            return UnavailableError("the stream was given up", reason="router_silent")
        finally:
            self.is_up = False
            self._call.cancel()
            self._stop_timers()
            writing.cancel()
            await asyncio.wait([writing])

    async def _write(self) -> None:
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                self._is_writing = True
                for message in self._take():
                    self.messages_sent += 1
                    await self._call.write(message)
                self._is_writing = False
        except (AioRpcError, asyncio.InvalidStateError):
            return  # The reader sees the same end and tells everybody.

    def _take(self) -> Sequence[pb.RouteRequest]:
        """What waits: reports first, since they make room for what is asked."""
        self._stop_timers()
        messages = [self._hello] if self._hello is not None else []
        self._hello = None
        reports, asks = self._reports, self._asks
        self._reports, self._asks = [], {}
        if self._takes_batches:
            self._unheard.update(asks)
            messages += self._together(reports, list(asks.items()))
        else:
            messages += _apart(reports, asks.items())
        return messages

    def _together(
        self, reports: Sequence[tuple[int, Report]], asks: Sequence[tuple[int, Ask]]
    ) -> Iterator[pb.RouteRequest]:
        while reports or asks:
            message = pb.RouteRequest()
            batch = message.batch
            for ask_id, report in reports[:REPORTS_MAX]:
                fill_report(batch.reports.add(), ask_id, report)
            taken, hashes = 0, 0
            for ask_id, ask in asks[: self._pace.asks_max]:
                hashes += len(ask.block_hashes)
                if taken and hashes > HASHES_MAX:
                    break
                fill_ask(batch.asks.add(), ask_id, ask)
                taken += 1
            reports, asks = reports[REPORTS_MAX:], asks[taken:]
            yield message

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._ask_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._ask_timer = None


def _apart(reports: Sequence[tuple[int, Report]], asks: Iterable[tuple[int, Ask]]) -> Iterator[pb.RouteRequest]:
    """For a router that knows no batches of asks."""
    for start in range(0, len(reports), REPORTS_MAX):
        part = [to_report(*each) for each in reports[start : start + REPORTS_MAX]]
        if len(part) == 1:
            yield pb.RouteRequest(report=part[0])
        else:
            yield pb.RouteRequest(reports=pb.ReportBatch(reports=part))
    for each in asks:
        yield pb.RouteRequest(ask=to_ask(*each))
