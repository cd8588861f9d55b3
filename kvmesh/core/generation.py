"""A generation request after templating and tokenisation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvmesh.core.sampling import SamplingParams


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
