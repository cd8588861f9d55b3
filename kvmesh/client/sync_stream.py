"""A streamed answer, for threads."""

import threading
from collections.abc import Generator
from types import TracebackType
from typing import Any, Generic

import grpc

from kvmesh.client.calling import Calling, StreamingCall, T
from kvmesh.errors import CancelledByCallerError
from kvmesh.rpc.status import from_rpc_error


class Stream(Generic[T]):
    """The pieces of an answer as they arrive. Leaving it (`with`), `close` or `cancel` stops the request on the mesh.

    The last piece of an answer has its usage. Raises MeshError on failure; a call that has returned nothing yet is retried first.
    """

    def __init__(self, calling: Calling, question: StreamingCall[T]) -> None:
        self._calling = calling
        self._question = question
        self._call: Any = None
        self._cancelled = threading.Event()
        self._pieces = self._run()

    def __iter__(self) -> "Stream[T]":
        return self

    def __next__(self) -> T:
        return next(self._pieces)

    def __enter__(self) -> "Stream[T]":
        return self

    def __exit__(self, kind: object, error: object, traceback: TracebackType | None) -> None:
        self.close()

    def cancel(self) -> None:
        """Stops the request, from any thread; the iterating task or thread gets CancelledByCallerError."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """Stops the request if it has not ended. Idempotent; not while another thread iterates: use `cancel` there."""
        self._cancelled.set()
        self._pieces.close()

    def _run(self) -> Generator[T, None, None]:
        calling, question = self._calling, self._question
        attempt = 0
        while True:
            self._check_cancelled()
            has_begun = False
            self._call = call = calling.begin(question.method, question.message, question.deadline_s)
            try:
                for message in call:
                    has_begun = True
                    yield question.read(message)
                return
            except grpc.RpcError as error:
                self._check_cancelled()
                failure = from_rpc_error(error, where=calling.address, has_begun=has_begun)
                wait_s = None if has_begun else calling.wait_s(failure, attempt, question.deadline_s)
                if wait_s is None:
                    raise failure from error
            finally:
                call.cancel()
            self._cancelled.wait(wait_s)
            attempt += 1

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CancelledByCallerError("the stream was cancelled")
