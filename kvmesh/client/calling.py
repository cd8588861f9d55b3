"""Shared by both clients: deadlines, the API key, and retries."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Generic, TypeVar

import grpc

from kvmesh.client.settings import ClientSettings
from kvmesh.core import SamplingParams
from kvmesh.errors import DeadlineError, LostError, MeshError
from kvmesh.rpc.codec.inference import Options
from kvmesh.rpc.status import from_rpc_error

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """The calls of one client. Deadlines are times of the monotonic clock."""

    address: str
    settings: ClientSettings
    generator: Random

    def deadline_s(self, timeout_s: float | None) -> float:
        """The end of a call that starts now, with all its tries."""
        return time.monotonic() + (self.settings.timeout_s if timeout_s is None else timeout_s)

    def begin(self, method: Any, message: Any, deadline_s: float) -> Any:
        """One try."""
        left_s = max(1e-3, deadline_s - time.monotonic())
        return method(message, timeout=left_s, metadata=self.settings.metadata())

    def wait_s(self, failure: MeshError, attempt: int, deadline_s: float) -> float | None:
        """See RetryPolicy."""
        return self.settings.retry.wait_s(failure, attempt, deadline_s - time.monotonic(), self.generator)

    def next_wait_s(self, error: grpc.RpcError, attempt: int, deadline_s: float, *, is_repeatable: bool) -> float:
        """Seconds until the next try of a unary call. Raises the call's error if there is none.

        A call that is not repeatable is tried again only if the server refused it.
        """
        failure = from_rpc_error(error, where=self.address, has_begun=not is_repeatable)
        is_open = isinstance(failure, LostError) and not is_repeatable
        wait_s = None if is_open else self.wait_s(failure, attempt, deadline_s)
        if wait_s is None:
            raise failure from error
        return wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Generic[T]):
    """A streaming call: method, request, decoder of responses, and deadline."""

    method: Any
    message: Any
    read: Callable[[Any], T]
    deadline_s: float


def waited_too_long(batch_id: str) -> DeadlineError:
    """The error of `wait`."""
    return DeadlineError(f"{batch_id} has not ended yet")


def with_sampling(options: Options | None, sampling: SamplingParams | None, *, is_stream: bool) -> Options:
    """The options of one call."""
    options = options or Options()
    return replace(options, sampling=sampling or options.sampling, is_stream=is_stream)
