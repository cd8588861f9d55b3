"""The frontend's end of a router in its own process: asks are answered as they are asked, without a message.

Implements `kvmesh.rpc.clients.RouterLink`, as `kvmesh.rpc.router_link` does for routers elsewhere.
"""

import asyncio
from collections.abc import Callable

from kvmesh.clock import Clock
from kvmesh.core import Ask, Placement, ReportKind
from kvmesh.core.routing import SETTLING
from kvmesh.errors import DeadlineError, MeshError, OverloadedError, UnavailableError
from kvmesh.rpc.clients import Placed
from kvmesh.rpc.codec.router import check_ask
from kvmesh.rpc.router_link_settings import RouterLinkSettings
from kvmesh.rpc.router_stream import URGENT
from services.router.explain import ReportNote
from services.router.serving.queue_dispatcher import Notice, Reply
from services.router.serving.response_queue import Outbox
from services.router.serving.route_handler import Desk

Outcome = Placement | MeshError


class _Answers(Outbox[Reply | Notice]):
    """Hands answers over instead of keeping them for a stream."""

    def __init__(self, on_answer: Callable[[int, Outcome], None]) -> None:
        super().__init__(messages_max=1)
        self._on_answer = on_answer

    def put_nowait(self, message: Reply | Notice) -> None:
        """A notice says that an ask waits, of which there is no doubt here."""
        if isinstance(message, Reply):
            self._on_answer(message.ask_id, message.outcome)


class HostedRouterLink:
    """One frontend's way to the desk beside it. A part: it asks nothing before `open`, and everybody has an answer at `aclose`.

    1. An ask that is cancelled, or out of time, is withdrawn; a placement that comes after all is given back.
    2. Reports wait `report_delay_s` at most for others, or for an ask; failures and cancels do not wait.
    """

    def __init__(self, desk: Desk, *, frontend_id: str, clock: Clock, settings: RouterLinkSettings) -> None:
        self._desk = desk
        self._frontend_id = frontend_id
        self._clock = clock
        self._settings = settings
        self._answers = _Answers(self._on_answer)
        self._is_open = False
        self._opened = asyncio.Event()
        self._closed = False
        self._asks = 0
        self._asking = 0
        """The ask that is being made, and what was answered meanwhile."""
        self._said: Outcome | None = None
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._in_flight: set[int] = set()
        self._reports: list[tuple[int, ReportNote]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """The router takes requests."""
        if not self._closed:
            self._desk.hello(self._frontend_id)
            self._is_open = True
        self._opened.set()

    async def start(self) -> None:
        """Nothing to wait for: asks wait for the router within their own time."""

    async def aclose(self) -> None:
        """Asks that wait fail as unavailable. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(UnavailableError("the link to the router is closed", reason="no_router"))
        if self._is_open:
            self._tell()
            self._is_open = False
            self._desk.hung_up(self._answers)
            self._desk.bye(self._frontend_id)
        self._opened.set()

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        """Asks for a placement; see the protocol."""
        check_ask(ask)
        began_s = self._clock.now()
        if not self._is_open:
            await self._wait_open(timeout_s)
        if len(self._waiting) >= self._settings.messages_max:
            raise OverloadedError("too many asks wait for the router", reason="router_link_full", retry_after_s=1.0)
        ask_id, outcome = self._ask(ask)
        if outcome is None:
            end_s = began_s + max(timeout_s, ask.timeout_s or 0.0)
            outcome = await self._queued(ask_id, end_s - self._clock.now())
        if isinstance(outcome, MeshError):
            raise outcome
        self._in_flight.add(ask_id)
        return Placed(ask_id=ask_id, placement=outcome)

    def report_nowait(
        self,
        ask_id: int,
        kind: ReportKind,
        *,
        elapsed_s: float,
        cached_tokens: int | None = None,
        output_tokens: int = 0,
        error: MeshError | None = None,
        failed_worker_id: str = "",
        is_answered_by_prefill: bool = False,
    ) -> None:
        """Tells how a placed request goes; see the protocol."""
        if ask_id not in self._in_flight:
            return
        if kind in SETTLING:
            self._in_flight.discard(ask_id)
        note = ReportNote(
            kind=kind,
            elapsed_s=max(0.0, elapsed_s),
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            error=error,
            failed_worker_id=failed_worker_id,
            is_answered_by_prefill=is_answered_by_prefill,
        )
        self._note(ask_id, note)

    async def _wait_open(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened.wait()
        except TimeoutError:
            raise UnavailableError(
                "the router did not take requests in time", reason="no_router", retry_after_s=1.0
            ) from None
        if not self._is_open:
            raise UnavailableError("the link to the router is closed", reason="no_router")

    def _ask(self, ask: Ask) -> tuple[int, Outcome | None]:
        """What was said at once; None: it waits."""
        self._asks = self._asking = ask_id = self._asks + 1
        self._tell()
        self._desk.ask(self._frontend_id, ask_id, ask, self._answers)
        self._asking = 0
        outcome, self._said = self._said, None
        return ask_id, outcome

    async def _queued(self, ask_id: int, left_s: float) -> Outcome:
        """The answer to an ask that waits for room."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[ask_id] = answer
        try:
            async with asyncio.timeout(left_s):
                return await answer
        except BaseException as error:
            # A router that places it after all must not keep the reservation.
            self._note(ask_id, ReportNote(kind=ReportKind.CANCELLED, elapsed_s=0.0))
            if isinstance(error, TimeoutError):
                raise DeadlineError("the request's time was over before a worker had room") from None
            raise
        finally:
            del self._waiting[ask_id]

    def _on_answer(self, ask_id: int, outcome: Outcome) -> None:
        """To who waits for it. Whoever does not any more has withdrawn his ask."""
        answer = self._waiting.get(ask_id)
        if ask_id == self._asking:
            self._said = outcome
        elif answer is not None and not answer.done():
            answer.set_result(outcome)

    # Reports

    def _note(self, ask_id: int, note: ReportNote) -> None:
        self._reports.append((ask_id, note))
        if note.kind in URGENT or not self._settings.report_delay_s:
            self._tell()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._settings.report_delay_s, self._tell)

    def _tell(self) -> None:
        """Says what waits; it is counted in the next turn of the loop."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if self._reports:
            reports, self._reports = self._reports, []
            self._desk.report(self._frontend_id, reports)
            self._desk.come_back()
