"""A streamed answer, for asyncio."""

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Generic

import grpc.aio

from kvmesh.client.calling import Calling, StreamingCall, T
from kvmesh.errors import CancelledByCallerError
from kvmesh.rpc.status import from_rpc_error


class AsyncStream(Generic[T]):
    """The pieces of an answer as they arrive. Leaving it (`async with`), `aclose` or `cancel` stops the request on the mesh.

    The last piece of an answer has its usage. Raises MeshError on failure; a call that has returned nothing yet is retried first.
    """

    def __init__(self, calling: Calling, question: StreamingCall[T]) -> None:
        self._calling = calling
        self._question = question
        self._call: Any = None
        self._is_cancelled = False
        self._pieces = self._run()

    def __aiter__(self) -> "AsyncStream[T]":
        return self

    async def __anext__(self) -> T:
        return await anext(self._pieces)

    async def __aenter__(self) -> "AsyncStream[T]":
        return self

    async def __aexit__(self, kind: object, error: object, traceback: TracebackType | None) -> None:
        await self.aclose()

    def cancel(self) -> None:
        """Cancels the request. The iterator raises CancelledByCallerError."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def aclose(self) -> None:
        """Stops the request if it has not ended. Idempotent; not while another task iterates: use `cancel` there."""
        self._is_cancelled = True
        await self._pieces.aclose()

    async def _run(self) -> AsyncGenerator[T, None]:
        calling, question = self._calling, self._question
        attempt = 0
        while True:
            self._check_cancelled()
            has_begun = False
            self._call = call = calling.begin(question.method, question.message, question.deadline_s)
            try:
                async for message in call:
                    has_begun = True
                    yield question.read(message)
                return
            except grpc.aio.AioRpcError as error:
                self._check_cancelled()
                failure = from_rpc_error(error, where=calling.address, has_begun=has_begun)
                wait_s = None if has_begun else calling.wait_s(failure, attempt, question.deadline_s)
                if wait_s is None:
                    raise failure from error
            except asyncio.CancelledError:
                # gRPC raises it also when only the call was cancelled; a cancelled task must stay cancelled.
                task = asyncio.current_task()
                if self._is_cancelled and not (task is not None and task.cancelling()):
                    self._check_cancelled()
                raise
            finally:
                call.cancel()
            await asyncio.sleep(wait_s)
            attempt += 1

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise CancelledByCallerError("the stream was cancelled")
