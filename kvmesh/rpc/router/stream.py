"""One Route stream of a frontend."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from grpc.aio import EOF, AioRpcError

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.core import Ask, Report, ReportKind
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.rpc.codec.router import REPORTS_MAX, fill_ask, fill_report
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.rpc.status import from_rpc_error

URGENT = frozenset({ReportKind.FAILED, ReportKind.CANCELLED})
"""Sent immediately: they move work away from a worker that may be failing."""
HASHES_MAX = 1 << 16
"""Block hashes in a message with several asks: half a megabyte."""


class RouterStream:
    """Writes asks and reports. All that wait when a message is written share it.

    1. A report that is not urgent waits up to `report_delay_s` for others, or for an ask.
    2. An ask is written immediately while fewer than `asks_ahead` asks of the stream are unanswered. Otherwise it waits until there are
       fewer, at most `ask_delay_s`.
    """

    def __init__(self, call: Any, *, router_id: str, frontend_id: str, settings: RouterLinkSettings) -> None:
        self.router_id = router_id
        self.was_up = False
        self.is_up = False
        """True from the router's initial metadata until the stream breaks."""
        self.messages_sent = 0
        self._call = call
        self._is_writing = False
        self._settings = settings
        self._hello: pb.RouteRequest | None = pb.RouteRequest(hello=pb.Hello(frontend_id=frontend_id))
        self._asks: dict[int, Ask] = {}
        self._unanswered: set[int] = set()
        """Asks that are written, and neither answered nor queued at the router."""
        self._reports: list[tuple[int, Report]] = []
        self._reports_in_write: list[tuple[int, Report]] = []
        """During a write: the reports of its message, and of those that follow it."""
        self._wakeup = asyncio.Event()
        # Writes the Hello immediately.
        self._wakeup.set()
        self._report_timer: asyncio.TimerHandle | None = None
        self._ask_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Asks and reports that wait to be written."""
        return len(self._asks) + len(self._reports)

    @property
    def has_unwritten(self) -> bool:
        """True until gRPC has taken everything."""
        return self._is_writing or bool(self._asks or self._reports)

    def send_ask(self, ask_id: int, ask: Ask) -> None:
        self._asks[ask_id] = ask
        if len(self._unanswered) < self._settings.asks_ahead:
            self._wakeup.set()
        elif self._ask_timer is None:
            self._ask_timer = asyncio.get_running_loop().call_later(self._settings.ask_delay_s, self._wakeup.set)

    def send_report(self, ask_id: int, report: Report) -> None:
        self._reports.append((ask_id, report))
        if report.kind in URGENT or not self._settings.report_delay_s:
            self._wakeup.set()
        elif self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(self._settings.report_delay_s, self._wakeup.set)

    def on_answered(self, ask_ids: Iterable[int]) -> None:
        """The router has answered or queued these asks."""
        self._unanswered.difference_update(ask_ids)
        if self._asks and len(self._unanswered) < self._settings.asks_ahead:
            self._wakeup.set()

    def withdraw(self, ask_id: int) -> None:
        """Removes an ask that is not written yet, else reports it as cancelled."""
        if self._asks.pop(ask_id, None) is None:
            self.send_report(ask_id, Report(kind=ReportKind.CANCELLED, elapsed_s=0.0))

    def give_up(self) -> None:
        """Ends the stream: `run` returns soon."""
        self._call.cancel()

    def take_reports(self) -> Sequence[tuple[int, Report]]:
        """Returns the reports that were not written before the stream broke. The router may have received those of the last write."""
        reports = [*self._reports_in_write, *self._reports]
        self._reports_in_write, self._reports = [], []
        return reports

    async def run(
        self,
        on_up: Callable[["RouterStream"], None],
        on_message: Callable[["RouterStream", pb.RouteResponse], None],
    ) -> MeshError:
        """Writes and reads until the stream breaks. Returns the error that broke it.

        A host that does not even refuse sends no initial metadata: the stream is given up after `answer_timeout_s` without it.
        """
        writing = asyncio.create_task(self._write(), name=f"route-write-{self.router_id}")
        try:
            async with asyncio.timeout(self._settings.answer_timeout_s):
                await self._call.initial_metadata()
            if not self._call.done():  # A failed call has initial metadata too.
                self.is_up = self.was_up = True
                on_up(self)
            while (message := await self._call.read()) is not EOF:
                on_message(self, message)
            return UnavailableError("the router ended the stream", reason="stream_ended")
        except AioRpcError as error:
            return from_rpc_error(error, where=self.router_id)
        except TimeoutError:
            return UnavailableError("the router did not accept the stream in time", reason="router_silent")
        except asyncio.CancelledError:
            # grpc.aio raises CancelledError also if only the call was cancelled, as `give_up` does. The cancel of this task must go on.
            if not self._call.cancelled() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            return UnavailableError("the stream was abandoned", reason="router_silent")
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
                for message in self._take_messages():
                    self.messages_sent += 1
                    await self._call.write(message)
                self._is_writing = False
        except (AioRpcError, asyncio.InvalidStateError):
            return  # The reader gets the same error and returns it.

    def _take_messages(self) -> Iterator[pb.RouteRequest]:
        self._stop_timers()
        # Takes everything before the first write: what arrives during a write waits for the next wake.
        hello, self._hello = self._hello, None
        reports, self._reports = self._reports, []
        asks, self._asks = list(self._asks.items()), {}
        self._unanswered.update([ask_id for ask_id, _ in asks])
        if hello is not None:
            yield hello
        while reports or asks:
            message = pb.RouteRequest()
            for ask_id, report in reports[:REPORTS_MAX]:
                fill_report(message.reports.add(), ask_id, report)
            taken, hashes = 0, 0
            for ask_id, ask in asks[: self._settings.asks_max]:
                hashes += len(ask.block_hashes)
                # A single ask is sent however many hashes it has.
                if taken and hashes > HASHES_MAX:
                    break
                fill_ask(message.asks.add(), ask_id, ask)
                taken += 1
            # Kept if the write fails or is cancelled, because then this generator does not resume.
            self._reports_in_write = reports
            yield message
            self._reports_in_write = []
            reports, asks = reports[REPORTS_MAX:], asks[taken:]

    def _stop_timers(self) -> None:
        for timer in (self._report_timer, self._ask_timer):
            if timer is not None:
                timer.cancel()
        self._report_timer = self._ask_timer = None
