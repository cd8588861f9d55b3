"""What a frontend calls, as plain values: one typed client per service.

`prefill_client.py`, `decode_link.py` and `router_link.py` implement these over any channel that looks like a `grpc.aio.Channel`,
the in-memory one included, so the pipeline above them cannot tell them apart. Failures arrive as MeshError, never as RpcError.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.core import (
    Ask,
    FinishReason,
    Generation,
    KvHandle,
    Placement,
    Rendezvous,
    ReportKind,
    TokenLogprob,
    Usage,
    WorkerRef,
)
from kvmesh.errors import MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class LegFinish:
    """The end of a decode leg. `error` is set exactly when the reason is ERROR."""

    reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    stop_token_id: int | None = None
    error: MeshError | None = None
    was_recomputed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LegOutput:
    """A whole answer that came in one piece. Both kinds of log-probabilities are as in `LegSink`."""

    token_ids: Sequence[int]
    finish: LegFinish
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """A computed prompt. `handle` is None after a rendezvous and beside an `output`."""

    handle: KvHandle | None
    usage: Usage
    queue_s: float
    compute_s: float
    output: LegOutput | None = None


class PrefillClient(Protocol):
    """Calls PrefillService on any worker."""

    def may_answer(self, worker: WorkerRef) -> bool:
        """False: the worker is known not to answer single tokens. One that has not said may still give a handle instead."""
        ...

    async def prefill(
        self,
        worker: WorkerRef,
        *,
        request_id: str,
        generation: Generation,
        timeout_s: float,
        rendezvous: Rendezvous | None = None,
        reservation_id: str = "",
        wants_output: bool = False,
    ) -> PrefillResult:
        """Computes a prompt. Cancelling it stops the worker's computation and frees its blocks.

        With `wants_output`, for a generation of one token more, the result is that token; a handle from a worker that does not
        answer single tokens.
        """
        ...

    async def release_kv(self, worker: WorkerRef, handle_id: str, *, timeout_s: float) -> None:
        """Gives a handle back before its lease ends. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLeg:
    """What is submitted to a decode worker."""

    request_id: str
    generation: Generation
    timeout_s: float
    handle: KvHandle | None = None
    rendezvous: Rendezvous | None = None
    reservation_id: str = ""


class LegSink(Protocol):
    """Receives one leg's tokens. All methods are called from the link's reader, once per step frame, and must not block."""

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        """New tokens in order; at least one. `logprobs` has one entry per token when asked for.

        `came_s`: when their frame came, by the link's clock; asking it once per token costs more than the token's text.
        """
        ...

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """The prompt's log-probabilities, when asked for: one per token from the second on; before any token, at most once."""
        ...

    def on_finish(self, finish: LegFinish) -> None:
        """The end, exactly once, after all tokens; also when the worker is lost or silent (ERROR with LostError)."""
        ...


class DecodeLink(Protocol):
    """All legs of this frontend on one decode worker, over one Attach stream."""

    def submit_nowait(self, leg: DecodeLeg, sink: LegSink) -> Callable[[], None]:
        """Queues a leg and returns its cancel function (idempotent; the CANCELLED finish follows).

        Raises UnavailableError when the link is down, OverloadedError when the worker's submission limit is reached.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedCall:
    """Inputs of one embedding request. `dimensions` None: the model's own."""

    request_id: str
    model: str
    inputs: Sequence[Sequence[int]]
    dimensions: int | None = None
    adapter: str = ""
    priority: int = 0
    traceparent: str = ""
    reservation_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult:
    """Vectors in the order of the inputs."""

    vectors: Sequence[Sequence[float]]
    usage: Usage


class EmbedClient(Protocol):
    """Calls DecodeService.Embed on any worker."""

    async def embed(self, worker: WorkerRef, call: EmbedCall, *, timeout_s: float) -> EmbedResult:
        """All vectors. Cancelling it stops the worker's computation."""
        ...


class DecodeLinks(Protocol):
    """Links to all decode workers in use."""

    async def link(self, worker: WorkerRef, *, timeout_s: float) -> DecodeLink:
        """The standing link, or a new one once its Welcome came. UnavailableError when the worker cannot be reached."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A placement and the number under which it is reported on."""

    ask_id: int
    placement: Placement


class RouterLink(Protocol):
    """Asks and reports of this frontend, over one Route stream to one of the routers."""

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        """Asks for a placement; a refusal is raised. Cancelling withdraws the ask."""
        ...

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
        """Tells how a placed request goes. Never waits, never raises; lost with the stream."""
        ...
