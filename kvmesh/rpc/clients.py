"""The interfaces of a frontend's links to workers and routers.

`leg_link.py` and `router/link.py` implement these over any channel with the interface of `grpc.aio.Channel`, including the in-memory
one of `kvmesh.simulation`. Failures arrive as MeshError, never as RpcError.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core import (
    Ask,
    Leg,
    LegFinish,
    LegTask,
    Placement,
    Report,
    Role,
    TokenLogprob,
    Usage,
    WorkerRef,
)


class LegSink(Protocol):
    """Receives one leg's tokens and its end. The link's reader calls all methods, once per step frame; they must not block."""

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        """New tokens in order; at least one. `logprobs` has one entry per token when they were asked for.

        `came_s`: arrival time of the frame by the link's clock. Reading the clock per token would cost more than the token's text.
        """
        ...

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Log-probabilities of the prompt, if asked for: one per token from the second on; at most once, before any token."""
        ...

    def on_finish(self, finish: LegFinish) -> None:
        """The end: exactly once, after all tokens; also when the worker is lost or silent (ERROR with LostError)."""
        ...


class LegLink(Protocol):
    """All legs of this frontend on one worker, over one Attach stream."""

    @property
    def worker(self) -> WorkerRef:
        """The other end."""
        ...

    @property
    def tasks(self) -> Collection[LegTask]:
        """What the worker runs on this stream."""
        ...

    def submit_nowait(self, leg: Leg, sink: LegSink, *, timeout_s: float) -> Callable[[], None]:
        """Queues a leg and returns the function that cancels it (idempotent; the finish follows).

        Raises UnavailableError when the link is down, OverloadedError at the worker's limit of legs per stream,
        InvalidRequestError for a leg that exceeds gRPC's message size.
        """
        ...

    def release_nowait(self, handle_id: str) -> None:
        """Gives a handle of this worker back before its lease ends. On a link that is down the lease runs out instead."""
        ...


class LegLinks(Protocol):
    """Links to all workers in use."""

    async def link(self, worker: WorkerRef, role: Role, *, timeout_s: float, waits_for_lost: bool = True) -> LegLink:
        """Returns the open link to the service of `role`, or a new one after its Welcome.

        UnavailableError if it cannot be opened. `waits_for_lost` False: raises immediately if the link was lost and is not open again.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult:
    """Embeddings in the order of the inputs, and their tokens."""

    vectors: Sequence[Sequence[float]]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A placement and the number of its ask, which reports name."""

    ask_id: int
    placement: Placement


class RouterLink(Protocol):
    """Asks and reports of this frontend."""

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        """Has a request placed. Raises the router's refusal. Cancelling withdraws the ask."""
        ...

    def report_nowait(self, ask_id: int, report: Report) -> None:
        """Reports on a placed request. Never waits and never raises; a report may be lost with the router."""
        ...
