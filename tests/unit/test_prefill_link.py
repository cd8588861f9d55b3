"""What a prefill link sends for callers that leave before, with or after their answers, on a scripted gRPC stream."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest

from kvmesh.api.prefill.v1 import prefill_pb2 as pb
from kvmesh.core import WorkerRef
from kvmesh.errors import DeadlineError
from kvmesh.rpc.prefill_link import PrefillLink
from tests.patience import PATIENCE_S


class ScriptedStream:
    """The client's side of an Attach stream whose server is the test."""

    def __init__(self) -> None:
        self.written: list[pb.AttachRequest] = []
        self.on_response: Callable[[], None] = lambda: None
        """Called just before the link reads a response."""
        self._responses: asyncio.Queue[Any] = asyncio.Queue()
        self._has_written = asyncio.Condition()
        self.respond(pb.AttachResponse(welcome=pb.Welcome(worker_id="w1", epoch=1)))

    def respond(self, response: pb.AttachResponse) -> None:
        self._responses.put_nowait(response)

    def answer(self, number: int, handle_id: str) -> None:
        response = pb.PrefillResponse()
        response.handle.handle_id = handle_id
        self.respond(pb.AttachResponse(results=[pb.Result(number=number, response=response)]))

    async def wait_for_call(self, number: int) -> None:
        """Until the link has sent the call."""
        async with asyncio.timeout(PATIENCE_S), self._has_written:
            await self._has_written.wait_for(lambda: number in self.numbers())

    def numbers(self) -> list[int]:
        return [call.number for message in self.written for call in message.calls]

    def cancels(self) -> list[int]:
        return [number for message in self.written for number in message.cancels]

    def releases(self) -> list[str]:
        return [handle_id for message in self.written for handle_id in message.releases]

    async def write(self, message: pb.AttachRequest) -> None:
        async with self._has_written:
            self.written.append(message)
            self._has_written.notify_all()

    async def read(self) -> Any:
        response = await self._responses.get()
        self.on_response()
        return response

    def cancel(self) -> None:
        self._responses.put_nowait(grpc.aio.EOF)

    def cancelled(self) -> bool:
        return False


@pytest.fixture
async def stream() -> ScriptedStream:
    return ScriptedStream()


@pytest.fixture
async def link(stream: ScriptedStream) -> AsyncIterator[PrefillLink]:
    async def is_alive() -> bool:
        return True

    one = PrefillLink(
        WorkerRef(worker_id="w1", address="w1:1", epoch=1), stream, frontend_id="f1", is_alive=is_alive,
        probe_interval_s=PATIENCE_S, on_end=lambda _: None,
    )  # fmt: skip
    yield one
    await one.aclose()


def ask(link: PrefillLink, timeout_s: float = PATIENCE_S) -> "asyncio.Task[pb.PrefillResponse]":
    def fill(request: pb.PrefillRequest, packs_tokens: bool) -> None:
        request.request_id = "r"

    return asyncio.create_task(link.prefill(fill, timeout_s))


async def send_another(link: PrefillLink, stream: ScriptedStream, number: int) -> None:
    """A later call. Its message carries the cancels and releases that the link has to send, unless an earlier one did."""
    call = ask(link)
    await stream.wait_for_call(number)
    stream.answer(number, f"h{number}")
    await call


async def test_a_call_that_is_cancelled_is_cancelled_on_the_worker(link: PrefillLink, stream: ScriptedStream) -> None:
    """The worker gets the cancel, once."""
    call = ask(link)
    await stream.wait_for_call(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await send_another(link, stream, 2)
    assert stream.cancels() == [1]


async def test_a_handle_that_comes_after_its_caller_left_is_released(link: PrefillLink, stream: ScriptedStream) -> None:
    """The call's deadline is over, its cancel and the worker's answer cross on the way: the handle goes back."""
    call = ask(link, timeout_s=0.01)
    with pytest.raises(DeadlineError):
        await call
    stream.answer(1, "late")
    await send_another(link, stream, 2)
    await send_another(link, stream, 3)
    assert stream.releases() == ["late"]
    assert stream.cancels() == [1]


async def test_a_handle_that_comes_as_its_caller_leaves_is_released(link: PrefillLink, stream: ScriptedStream) -> None:
    """The caller is cancelled after its answer was read and before it ran: it never sees the handle, so the link returns it."""
    call = ask(link)
    await stream.wait_for_call(1)
    # Scheduled before the link wakes the caller, so the caller is cancelled with its answer already there.
    stream.on_response = lambda: asyncio.get_running_loop().call_soon(call.cancel) and None
    stream.answer(1, "crossed")
    with pytest.raises(asyncio.CancelledError):
        await call
    stream.on_response = lambda: None
    await send_another(link, stream, 2)
    assert stream.releases() == ["crossed"]
    assert stream.cancels() == [], "an answered call has nothing to cancel"
