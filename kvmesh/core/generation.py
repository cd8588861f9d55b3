"""A generation: the request after templating and tokenisation, its output, and its legs, the parts that run on one worker each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvmesh.core.kv import KvHandle, KvReader, Rendezvous
from kvmesh.core.sampling import SamplingParams
from kvmesh.errors import MeshError


class MediaKind(StrEnum):
    """Kinds of media."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One piece of media; it covers `length` prompt positions from `position` on. At most one source is set."""

    kind: MediaKind
    content_hash: bytes
    position: int
    length: int
    data: bytes | None = None
    url: str | None = None
    encoder_handle: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The input of an engine, the same for the prefill and the decode worker.

    `emitted_token_ids` were already sent to the client: they follow the prompt and are not emitted again.
    """

    model: str
    token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    emitted_token_ids: Sequence[int] = ()
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0
    media: Sequence[Media] = ()
    traceparent: str = ""
    data_parallel_rank: int | None = None


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"
    HANDED_OFF = "handed_off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request. Cached: found in a prefix cache. Transferred: KV that came from another worker."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural logarithm of one token's probability, and the best alternatives as (token id, log-probability)."""

    logprob: float
    alternatives: Sequence[tuple[int, float]] = ()


class LegTask(StrEnum):
    """The work of a leg."""

    PREFILL = "prefill"
    """Compute the prompt and keep its KV under a lease. Ends with HANDED_OFF and a handle (sequential handoff), or with HANDED_OFF
    alone once the transfer is over (rendezvous). A rendezvous leg also scores the prompt if the request asks for it."""
    GENERATE = "generate"
    """Generate tokens. The prompt's KV comes by `handle` or `rendezvous`; without both the worker computes the prompt."""
    EMBED = "embed"
    """Compute the prompt's embedding. Ends with STOP and an `embedding`. Engines without the feature `embeddings` refuse it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Work for one worker. `leg_id` is unique in the mesh while the leg runs; engines may use it as their own id.

    `dimensions`: length of the embedding; None: the model's own. `reader`: the worker and leg that will read the handle of a PREFILL leg.
    """

    leg_id: str
    task: LegTask
    generation: Generation
    handle: KvHandle | None = None
    rendezvous: Rendezvous | None = None
    dimensions: int | None = None
    reader: KvReader | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LegFinish:
    """The end of a leg. `error` is set exactly when the reason is ERROR, `handle` only with HANDED_OFF, and `embedding`
    (normalised) exactly at the successful end of an EMBED leg."""

    reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    stop_token_id: int | None = None
    error: MeshError | None = None
    was_recomputed: bool = False
    handle: KvHandle | None = None
    embedding: Sequence[float] | None = None
