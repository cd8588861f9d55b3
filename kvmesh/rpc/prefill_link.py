"""The frontend's end of PrefillService.Attach: one stream per worker, one answer per call, in any order."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from grpc import StatusCode
from grpc.aio import AioRpcError

from kvmesh.api.prefill.v1 import prefill_pb2 as pb
from kvmesh.clock import WAKING_S, stood_still
from kvmesh.core import WorkerRef
from kvmesh.errors import DeadlineError, InternalError, InvalidRequestError, LostError, MeshError, UnavailableError
from kvmesh.rpc.codec.scalars import fill_positive_duration
from kvmesh.rpc.paced import DEFAULT_PACE_S, PacedWrites
from kvmesh.rpc.status import from_detail, from_rpc_error

CALLS_PER_MESSAGE = 1024
MESSAGE_BYTES = 1 << 20
"""A message is closed once it is that large; long prompts in one message would reach gRPC's limit together."""
CALL_BYTES_MAX = 60 << 20
"""What fits gRPC's default limit of 64 MiB with some room."""


Fill = Callable[[pb.PrefillRequest, bool], None]
"""Writes a call into its message; the second is whether the worker takes packed token ids."""


class NoAttachError(MeshError):
    """The worker has no Attach; each prompt is a call of its own there."""

    default_reason = "no_attach"


class PrefillLink:
    """One stream. It begins with its first call, ends when the stream breaks, and is then replaced, not mended.

    1. A call is in `_pending` exactly until its answer, its caller's leaving or the stream's end.
    2. A handle that comes for a call whose caller has left is given back.
    """

    def __init__(
        self,
        worker: WorkerRef,
        call: Any,
        *,
        frontend_id: str,
        is_alive: Callable[[], Awaitable[bool]],
        probe_interval_s: float,
        on_end: Callable[["PrefillLink"], None],
        pace_s: float = DEFAULT_PACE_S,
    ) -> None:
        self.worker = worker
        self._call = call
        self._is_alive = is_alive
        self._probe_interval_s = probe_interval_s
        self._on_ended = on_end
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, asyncio.Future[pb.PrefillResponse]] = {}
        self._requests: deque[pb.AttachRequest] = deque()
        """Calls that wait to be written, by the message in which they will be."""
        self._request_bytes = 0
        self._cancels: list[int] = []
        self._releases: list[str] = []
        self._last_number = 0
        self._writes = PacedWrites(call, self._take_request, pace_s=pace_s)
        hello = pb.AttachRequest(hello=pb.Hello(frontend_id=frontend_id))
        self._error: MeshError | None = None
        self._has_welcome = False
        self._packs_tokens = False
        self.may_answer = True
        """Whether the worker answers single tokens; true until its Welcome says something else."""
        self._heard_at_s = self._loop.time()
        name = worker.worker_id
        self._tasks = [
            self._loop.create_task(self._read(), name=f"prefill-link-read-{name}"),
            self._loop.create_task(self._writes.run(hello), name=f"prefill-link-write-{name}"),
            self._loop.create_task(self._watch(), name=f"prefill-link-watch-{name}"),
        ]

    @property
    def is_up(self) -> bool:
        """False once the stream has ended."""
        return self._error is None

    async def prefill(self, fill: Fill, timeout_s: float) -> pb.PrefillResponse:
        """One call, which `fill` writes into its message. Cancelling it cancels it on the worker."""
        if self._error is not None:
            raise UnavailableError(self._error.message, reason="worker_unreachable", where=self.worker.worker_id)
        number = self._last_number = self._last_number + 1
        self._add_call(number, fill, timeout_s)
        answer = self._pending[number] = self._loop.create_future()
        timer = None
        if not math.isinf(timeout_s):
            timer = _Deadline(self._loop, timeout_s, answer, self.worker.worker_id)
        self._writes.wake()
        try:
            response: pb.PrefillResponse = await answer
            return response
        except asyncio.CancelledError:
            self._give_back(answer)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if self._pending.pop(number, None) is not None:
                self._cancels.append(number)
                self._writes.wake()

    def _give_back(self, answer: "asyncio.Future[pb.PrefillResponse]") -> None:
        """The handle of an answer that crossed with its caller's leaving."""
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self._release(answer.result())

    def _release(self, response: pb.PrefillResponse) -> None:
        if response.HasField("handle"):
            self._releases.append(response.handle.handle_id)
            self._writes.wake()

    def _add_call(self, number: int, fill: Fill, timeout_s: float) -> None:
        """Into the message that is written next, or into one after it when that one is full."""
        requests = self._requests
        if not requests or self._request_bytes >= MESSAGE_BYTES or len(requests[-1].calls) == CALLS_PER_MESSAGE:
            requests.append(pb.AttachRequest())
            self._request_bytes = 0
        call = requests[-1].calls.add(number=number)
        # What is said before the Welcome is said as every worker understands it.
        fill(call.request, self._packs_tokens)
        if not math.isinf(timeout_s):
            fill_positive_duration(call.timeout, timeout_s)
        size = call.ByteSize()
        if size > CALL_BYTES_MAX:
            # gRPC would end the stream, and every other call on it, for one that is too large.
            del requests[-1].calls[-1]
            raise InvalidRequestError(
                f"the request has {size} bytes; at most {CALL_BYTES_MAX} can be sent", reason="message_too_large"
            )
        self._request_bytes += size

    def _take_request(self) -> pb.AttachRequest:
        """The next message. Cancels go with the last calls, never before their own."""
        request = self._requests.popleft() if self._requests else pb.AttachRequest()
        if self._requests:
            self._writes.wake()
            return request
        request.cancels.extend(self._cancels)
        request.releases.extend(self._releases)
        self._cancels.clear()
        self._releases.clear()
        return request

    async def _read(self) -> None:
        where = self.worker.worker_id
        error: MeshError = LostError("the worker ended the stream", reason="worker_lost", where=where)
        try:
            while isinstance(response := await self._call.read(), pb.AttachResponse):
                self._heard_at_s = self._loop.time()
                if not self._has_welcome:
                    self._greet(response)
                for result in response.results:
                    self._on_result(result)
        except AioRpcError as problem:
            error = self._meaning(problem)
        except MeshError as problem:
            error = problem
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._call.cancelled() or (task is not None and task.cancelling()):
                raise
        finally:
            self._end(error)

    def _meaning(self, problem: AioRpcError) -> MeshError:
        # gRPC's own word for a write on a stream that the server has just ended: its real status is then lost.
        is_cut_off = problem.code() is StatusCode.INTERNAL and problem.details() == "Internal error from Core"
        if (problem.code() is StatusCode.UNIMPLEMENTED or is_cut_off) and not self._has_welcome:
            return NoAttachError("the worker has no Attach", where=self.worker.worker_id)
        # A server that stops cancels what is left: lost work, not a caller's cancel. A refused connection did nothing.
        has_begun = self._has_welcome or problem.code() is not StatusCode.UNAVAILABLE
        return from_rpc_error(problem, where=self.worker.worker_id, has_begun=has_begun)

    def _greet(self, response: pb.AttachResponse) -> None:
        """A worker that started anew, or another one on the same port, is not what was placed on; epoch 0 is not known."""
        welcome = response.welcome
        if not response.HasField("welcome") or welcome.worker_id != self.worker.worker_id:
            raise UnavailableError(
                "another worker answers at this address", reason="worker_changed", where=self.worker.worker_id
            )
        if self.worker.epoch not in (0, welcome.epoch):
            raise UnavailableError("the worker has started anew", reason="worker_changed", where=self.worker.worker_id)
        self._has_welcome = True
        self._packs_tokens = welcome.takes_packed_token_ids
        self.may_answer = welcome.answers_single_tokens

    def _on_result(self, result: pb.Result) -> None:
        answer = self._pending.pop(result.number, None)
        kind = result.WhichOneof("outcome")
        if answer is None or answer.done():
            if kind == "response":
                self._release(result.response)
        elif kind == "response":
            answer.set_result(result.response)
        elif kind == "error":
            answer.set_exception(from_detail(result.error))
        else:
            answer.set_exception(InternalError("the worker gave no answer", where=self.worker.worker_id))

    async def _watch(self) -> None:
        """Looks now and then whether the worker of long calls still answers; see `GrpcPrefillClient`."""
        while True:
            due_s = self._loop.time() + self._probe_interval_s
            await asyncio.sleep(self._probe_interval_s)
            if stood_still(due_s, self._loop.time()):
                continue  # What came while this process stood still is unread.
            is_silent = self._loop.time() - self._heard_at_s >= self._probe_interval_s / 2
            if self._pending and is_silent and not await self._is_alive():
                where = self.worker.worker_id
                self._end(LostError("the prefill worker has gone silent", reason="worker_silent", where=where))
                return

    def _end(self, error: MeshError) -> None:
        """Fails all calls. Only the first end counts."""
        if self._error is not None:
            return
        self._error = error
        self._call.cancel()
        self._requests.clear()
        self._cancels.clear()
        self._releases.clear()
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(_copy(error))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._on_ended(self)

    async def aclose(self) -> None:
        """Ends the stream; calls on it fail as lost."""
        self._end(LostError("the frontend closed the link", reason="link_closed", where=self.worker.worker_id))
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Deadline:
    """Ends a call when its time is over. The answer to a call may lie unread when this process stood still: that is read first."""

    __slots__ = ("_answer", "_due_s", "_is_waking", "_loop", "_timer", "_where")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        answer: "asyncio.Future[pb.PrefillResponse]",
        where: str,
    ) -> None:
        self._loop = loop
        self._answer = answer
        self._where = where
        self._is_waking = False
        self._wait(timeout_s)

    def _wait(self, wait_s: float) -> None:
        self._due_s = self._loop.time() + wait_s
        self._timer = self._loop.call_later(wait_s, self._on_time)

    def _on_time(self) -> None:
        if self._answer.done():
            return
        if not self._is_waking and stood_still(self._due_s, self._loop.time()):
            self._is_waking = True  # Once only: a process that is always late must end its calls too.
            self._wait(WAKING_S)
        else:
            self._answer.set_exception(DeadlineError("the request ran out of time", where=self._where))

    def cancel(self) -> None:
        """The call is over."""
        self._timer.cancel()


def _copy(error: MeshError) -> MeshError:
    """One for each caller, since every one adds its own traceback."""
    return type(error)(error.message, reason=error.reason, where=error.where, retry_after_s=error.retry_after_s)
