"""The link from a frontend to a router in the same process: calls instead of messages.

Implements `kvmesh.rpc.clients.RouterLink`, as `kvmesh.rpc.router.link` does for routers in other processes.
"""

import asyncio
from collections.abc import Callable

from kvmesh.clock import Clock
from kvmesh.core import Ask, Placement, Report, ReportKind
from kvmesh.core.routing import SETTLING
from kvmesh.errors import DeadlineError, MeshError, OverloadedError, UnavailableError
from kvmesh.rpc.clients import Placed
from kvmesh.rpc.codec.router import check_ask
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.rpc.router.stream import URGENT
from services.router.serving.response_queue import AskResponse, QueuedNotice, ResponseQueue
from services.router.serving.route_handler import RouteHandler

Outcome = Placement | MeshError


class _Responses(ResponseQueue):
    """Calls back with each answer instead of keeping it for a stream."""

    def __init__(self, on_answer: Callable[[int, Outcome], None]) -> None:
        super().__init__(responses_max=1)
        self._on_answer = on_answer

    def put_nowait(self, response: AskResponse | QueuedNotice) -> None:
        """Ignores notices: in one process a queued ask cannot be lost."""
        if isinstance(response, AskResponse):
            self._on_answer(response.ask_id, response.outcome)


class HostedRouterLink:
    """A running part. It sends no ask before `open`. `aclose` answers all asks.

    1. An ask that is cancelled or times out is withdrawn. If it is placed after all, the placement is returned.
    2. Reports are buffered for at most `report_delay_s`, or until an ask. Failures and cancellations are sent immediately.
    """

    def __init__(self, handler: RouteHandler, *, frontend_id: str, clock: Clock, settings: RouterLinkSettings) -> None:
        self._handler = handler
        self._frontend_id = frontend_id
        self._clock = clock
        self._settings = settings
        self._responses = _Responses(self._on_answer)
        self._is_open = False
        self._opened = asyncio.Event()
        self._closed = False
        self._asks = 0
        self._current_ask = 0
        """The ask that `_ask` is making; its answer is in `_answer`."""
        self._answer: Outcome | None = None
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._in_flight: set[int] = set()
        self._reports: list[tuple[int, Report]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Sends asks from now on, since the router takes requests."""
        if not self._closed:
            self._handler.add_stream(self._frontend_id)
            self._is_open = True
        self._opened.set()

    async def start(self) -> None:
        """Does nothing: each ask waits for the router within its own timeout."""

    async def aclose(self) -> None:
        """Fails the asks that wait as unavailable. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(UnavailableError("the link to the router is closed", reason="no_router"))
        if self._is_open:
            self._send_reports()
            self._is_open = False
            self._handler.end_responses(self._responses)
            self._handler.remove_stream(self._frontend_id)
        # Ends the wait in `_wait_open`, which then finds the link closed.
        self._opened.set()

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        """See the protocol."""
        check_ask(ask)
        began_s = self._clock.now()
        if not self._is_open:
            await self._wait_open(timeout_s)
        if len(self._waiting) >= self._settings.messages_max:
            raise OverloadedError("too many asks wait for the router", reason="router_link_full", retry_after_s=1.0)
        ask_id, outcome = self._ask(ask)
        if outcome is None:
            # `timeout_s` bounds the placing. A queued ask may wait for its own timeout.
            end_s = began_s + max(timeout_s, ask.timeout_s or 0.0)
            outcome = await self._wait_answer(ask_id, end_s - self._clock.now())
        if isinstance(outcome, MeshError):
            raise outcome
        self._in_flight.add(ask_id)
        return Placed(ask_id=ask_id, placement=outcome)

    def report_nowait(self, ask_id: int, report: Report) -> None:
        """See the protocol."""
        if ask_id not in self._in_flight:
            return
        if report.kind in SETTLING:
            self._in_flight.discard(ask_id)
        self._add_report(ask_id, report)

    async def _wait_open(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened.wait()
        except TimeoutError:
            raise UnavailableError(
                "the router did not accept requests in time", reason="no_router", retry_after_s=1.0
            ) from None
        if not self._is_open:
            raise UnavailableError("the link to the router is closed", reason="no_router")

    def _ask(self, ask: Ask) -> tuple[int, Outcome | None]:
        """Returns the ask's number and its answer. None: it is queued."""
        self._asks = self._current_ask = ask_id = self._asks + 1
        self._send_reports()
        # The handler may answer during the call. `_on_answer` then puts the answer into `_answer`, and no future is needed.
        self._handler.ask(self._frontend_id, ask_id, ask, responses=self._responses)
        self._current_ask = 0
        outcome, self._answer = self._answer, None
        return ask_id, outcome

    async def _wait_answer(self, ask_id: int, left_s: float) -> Outcome:
        """Waits for the answer to a queued ask."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[ask_id] = answer
        try:
            async with asyncio.timeout(left_s):
                return await answer
        except BaseException as error:
            # If the router places it after all, the reservation must not stay.
            self._add_report(ask_id, Report(kind=ReportKind.CANCELLED, elapsed_s=0.0))
            if isinstance(error, TimeoutError):
                raise DeadlineError("the request timed out before a worker had capacity") from None
            raise
        finally:
            del self._waiting[ask_id]

    def _on_answer(self, ask_id: int, outcome: Outcome) -> None:
        """Resolves the caller's future. A missing one means that the caller cancelled."""
        answer = self._waiting.get(ask_id)
        if ask_id == self._current_ask:
            self._answer = outcome
        elif answer is not None and not answer.done():
            answer.set_result(outcome)

    # Reports

    def _add_report(self, ask_id: int, report: Report) -> None:
        self._reports.append((ask_id, report))
        if report.kind in URGENT or not self._settings.report_delay_s:
            self._send_reports()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._settings.report_delay_s, self._send_reports)

    def _send_reports(self) -> None:
        """The handler applies them in the next iteration of the event loop."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if self._reports:
            reports, self._reports = self._reports, []
            self._handler.reports.add(self._frontend_id, reports)
            self._handler.reports.schedule()
