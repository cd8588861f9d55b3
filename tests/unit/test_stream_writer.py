"""Writes to clients that read slowly, in virtual time."""

import asyncio
from typing import Any

import pytest

from kvmesh.errors import CancelledByCallerError
from services.frontend.api.grpc.stream_writer import ANSWER_UNREAD, StreamWriter
from tests.virtual_loop import run_virtual

LIMIT_S = 3.0


class SlowContext:
    """The context of a call whose client takes `pause_s` for each message. Like gRPC's, it refuses a message while another is being written."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._is_writing = False
        self.read: list[int] = []

    async def write(self, message: int) -> None:
        assert not self._is_writing
        self._is_writing = True
        await asyncio.sleep(self._pause_s)
        self._is_writing = False
        self.read.append(message)


def test_a_slow_reader_gets_everything() -> None:
    """The limit applies to each message, not to all together, and messages of several tasks are written one after the other."""

    async def main() -> list[int]:
        context: Any = SlowContext(0.9 * LIMIT_S)
        async with StreamWriter(context, unread_timeout_s=LIMIT_S) as writer:
            await asyncio.gather(*(writer.write(number) for number in range(10)))
        return context.read

    assert run_virtual(main()) == list(range(10))


def test_an_error_leaves_after_the_message_that_is_being_written() -> None:
    """gRPC accepts no status before that."""

    async def main() -> tuple[list[int], float]:
        context: Any = SlowContext(10 * LIMIT_S)
        with pytest.raises(CancelledByCallerError) as caught:
            async with StreamWriter(context, unread_timeout_s=LIMIT_S) as writer:
                await writer.write(1)
        assert caught.value.reason == ANSWER_UNREAD
        return context.read, asyncio.get_running_loop().time()

    read, now_s = run_virtual(main())
    assert read == [1] and now_s == pytest.approx(10 * LIMIT_S)


def test_a_cancelled_writer_leaves_its_message_to_the_next_one() -> None:
    """A message that has begun is written before the next one begins."""

    async def main() -> list[int]:
        context: Any = SlowContext(0.9 * LIMIT_S)
        async with StreamWriter(context, unread_timeout_s=LIMIT_S) as writer:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writer.write(1), LIMIT_S / 2)
            await writer.write(2)
        return context.read

    assert run_virtual(main()) == [1, 2]
