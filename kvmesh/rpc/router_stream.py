"""One Route stream of a frontend, from its hello until it breaks."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from grpc.aio import EOF, AioRpcError

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.core import Ask, ReportKind
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.rpc.codec.router import REPORTS_MAX, Report, to_ask, to_report
from kvmesh.rpc.status import from_rpc_error

URGENT = frozenset({ReportKind.FAILED, ReportKind.CANCELLED})
"""Not kept back: they take work away from a worker that may be in trouble."""


class RouterStream:
    """Writes asks at once and reports in bundles.

    A turn of the loop is one bundle. A report that is not urgent is kept back for `report_delay_s` unless an ask goes out before.
    """

    def __init__(self, call: Any, router_id: str, frontend_id: str, *, report_delay_s: float) -> None:
        self.router_id = router_id
        self.has_stood = False
        """The router said once that it hears."""
        self.is_up = False
        self.messages_sent = 0
        self._call = call
        self._report_delay_s = report_delay_s
        self._hello: pb.RouteRequest | None = pb.RouteRequest(hello=pb.Hello(frontend_id=frontend_id))
        self._asks: dict[int, Ask] = {}
        self._reports: list[tuple[int, Report]] = []
        self._wakeup = asyncio.Event()
        self._wakeup.set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Asks and reports that wait to be written."""
        return len(self._asks) + len(self._reports)

    def ask(self, ask_id: int, ask: Ask) -> None:
        """Asks."""
        self._asks[ask_id] = ask
        self._wakeup.set()

    def withdraw(self, ask_id: int) -> None:
        """Takes an ask back; one that was not written yet never was."""
        if self._asks.pop(ask_id, None) is None:
            self.report(ask_id, Report(kind=ReportKind.CANCELLED, elapsed_s=0.0))

    def report(self, ask_id: int, report: Report) -> None:
        """Reports."""
        self._reports.append((ask_id, report))
        if report.kind in URGENT or not self._report_delay_s:
            self._wakeup.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._report_delay_s, self._wakeup.set)

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
                await self._call.initial_metadata()
            if not self._call.done():  # A call that failed has initial metadata too.
                self.is_up = self.has_stood = True
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
            if self._timer is not None:
                self._timer.cancel()
            writing.cancel()
            await asyncio.wait([writing])

    async def _write(self) -> None:
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                for message in self._take():
                    self.messages_sent += 1
                    await self._call.write(message)
        except (AioRpcError, asyncio.InvalidStateError):
            return  # The reader sees the same end and tells everybody.

    def _take(self) -> Sequence[pb.RouteRequest]:
        """What waits: reports first, since they make room for what is asked."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        messages = [self._hello] if self._hello is not None else []
        self._hello = None
        reports = [to_report(ask_id, report) for ask_id, report in self._reports]
        for start in range(0, len(reports), REPORTS_MAX):
            part = reports[start : start + REPORTS_MAX]
            if len(part) == 1:
                messages.append(pb.RouteRequest(report=part[0]))
            else:
                messages.append(pb.RouteRequest(reports=pb.ReportBatch(reports=part)))
        messages += [pb.RouteRequest(ask=to_ask(ask_id, ask)) for ask_id, ask in self._asks.items()]
        self._reports.clear()
        self._asks.clear()
        return messages
