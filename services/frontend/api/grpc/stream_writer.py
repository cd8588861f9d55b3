"""Writes the messages of a stream at the pace of its client."""

import asyncio
from traceback import clear_frames
from types import TracebackType
from typing import Any

from grpc.aio import ServicerContext

from kvmesh.clock import awake_timeout
from kvmesh.errors import CancelledByCallerError

ANSWER_UNREAD = "answer_unread"


class StreamWriter:
    """Writes messages to the client of one call, also for several tasks. gRPC takes one message at a time, so the others wait.

    gRPC writes a message that it has begun to its end, even if the writer is cancelled, and accepts no status before that. So an error that
    leaves the context waits until the client has read the message or has disconnected.
    """

    def __init__(self, context: "ServicerContext[Any, Any]", *, unread_timeout_s: float) -> None:
        self._context = context
        self._unread_timeout_s = unread_timeout_s
        self._lock = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None

    async def write(self, message: Any) -> None:
        """Returns when gRPC has taken the message. Raises CancelledByCallerError if the client takes nothing of it for `unread_timeout_s`."""
        async with self._lock:
            # The message of a writer that was cancelled.
            await self._wait_written()
            self._writing = asyncio.ensure_future(self._context.write(message))
            self._writing.add_done_callback(_ignore_failure)
            await self._wait_written()

    async def _wait_written(self) -> None:
        if self._writing is None:
            return
        try:
            async with awake_timeout(self._unread_timeout_s):
                await asyncio.shield(self._writing)
        except TimeoutError:
            message = f"the client read nothing of the answer for {self._unread_timeout_s:g} s"
            raise CancelledByCallerError(message, reason=ANSWER_UNREAD) from None
        self._writing = None

    async def __aenter__(self) -> "StreamWriter":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writing is None or self._writing.done() or not isinstance(error, Exception):
            return
        # The frames hold the answer, and the client may never read it.
        clear_frames(traceback)
        await asyncio.wait({self._writing})


def _ignore_failure(writing: "asyncio.Future[None]") -> None:
    """A failure goes to the writer, if it still waits. Otherwise asyncio would log it."""
    if not writing.cancelled():
        writing.exception()
