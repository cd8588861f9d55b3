"""A leg: the part of a request that runs on one worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvmesh.core.generation import Generation
from kvmesh.core.kv import KvHandle, KvReader, Rendezvous
from kvmesh.core.output import FinishReason, Usage
from kvmesh.errors import MeshError


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

    `dimensions`: length of the embedding; None: the model's own. `reader`: who will read the handle of a PREFILL leg.
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
