"""The shared state of both ends of a call."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from kvmesh.simulation.rpc.pipe import MemoryLink, Pipe

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStatus:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    trailing: Metadata = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of every call of a network."""

    buffer_messages: int
    message_bytes_max: int
    is_serialising: bool


class MemoryExchange:
    """One call. Calls `on_initial` at most once and `on_status` exactly once."""

    def __init__(
        self,
        link: MemoryLink,
        limits: Limits,
        *,
        path: str,
        metadata: Metadata,
        deadline_s: float | None,
        on_initial: Callable[[Metadata], None],
        on_status: Callable[[CallStatus], None],
    ) -> None:
        self.link = link
        self.limits = limits
        self.path = path
        self.metadata = metadata
        self.deadline_s = deadline_s
        self.requests = Pipe(link, limits.buffer_messages, lambda _: None)
        self.responses = Pipe(link, limits.buffer_messages, self.end_client)
        self.task: asyncio.Task[None] | None = None
        self.status: CallStatus | None = None
        self.is_cancelled = False
        self._on_initial = on_initial
        self._on_status = on_status
        self._is_initial_sent = False

    def send_initial(self, metadata: Metadata) -> None:
        self.link.deliver(lambda: self._initial(metadata))

    def end_client(self, status: CallStatus) -> None:
        """Ends the call for the client; only the first call has an effect."""
        if self.status is not None:
            return
        self.status = status
        self.requests.discard()
        self.responses.discard()
        # Empty if the server has sent none, so that waiters of a call that is over get a result.
        self._initial(())
        self._on_status(status)

    def cancel_server(self) -> None:
        """Cancels the server's task, after the link's latency."""
        self.link.deliver(self.cancel_task)

    def cancel_task(self) -> None:
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()

    def break_both(self, status: CallStatus) -> None:
        """Breaks the connection; both sides notice immediately."""
        self.end_client(status)
        self.cancel_task()

    def too_large(self, message: Any, sender: str) -> CallStatus | None:
        """Returns the status for a message over the limit, worded as gRPC does."""
        if not isinstance(message, bytes) or len(message) <= self.limits.message_bytes_max:
            return None
        details = f"{sender}: Sent message larger than max ({len(message)} vs. {self.limits.message_bytes_max})"
        return CallStatus(code=grpc.StatusCode.RESOURCE_EXHAUSTED, details=details)

    def _initial(self, metadata: Metadata) -> None:
        if not self._is_initial_sent:
            self._is_initial_sent = True
            self._on_initial(metadata)
