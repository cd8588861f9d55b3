"""A worker: identity, capabilities and load."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a worker does in the mesh."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


class Handoff(StrEnum):
    """How prefill and decode meet (see `protos/kvmesh/types/v1/kv.proto`)."""

    SEQUENTIAL = "sequential"
    RENDEZVOUS = "rendezvous"
    PUSH = "push"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRef:
    """A worker as placements identify it. `address` is host:port; `epoch` changes when its process restarts."""

    worker_id: str
    address: str
    epoch: int = 0
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model as it is served. `source` is the directory or name that tokenizer and template are loaded from.

    `files_digest` identifies tokenizer, template and configuration; empty: the worker does not serve them.
    """

    name: str
    source: str
    context_tokens_max: int
    vocabulary_size: int
    revision: str = ""
    eos_token_ids: Sequence[int] = ()
    adapters: Sequence[str] = ()
    files_digest: str = ""


FEATURES = frozenset(
    (
        "logprobs prompt_logprobs logit_bias seed priority lora structured_output kv_events reset_cache sleep embeddings "
        "data_parallel_ranks multi_rank multi_node image audio video speculative continued_penalties continued_seed continued_structured_output"
    ).split()
)
"""All values of `Capabilities.features`.

`continued_...`: after tokens that another engine emitted, the answer continues as if this engine had emitted them, with presence and
frequency penalties, with a seed, or with a constraint. Without it the engine refuses such a leg.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine supports; the support matrix is made from these records.

    `features` are from FEATURES.
    """

    engine: str
    engine_version: str
    handoffs: Sequence[Handoff] = ()
    roles: Sequence[Role] = ()
    features: Sequence[str] = ()
    logprobs_max: int = 0
    data_parallel_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PerformanceProfile:
    """How fast a worker is; fields as in `protos/kvmesh/types/v1/model.proto`. None: unknown."""

    prefill_base_s: float | None = None
    prefill_s_per_token: float | None = None
    prefill_s_per_token_pair: float | None = None
    decode_step_base_s: float | None = None
    decode_s_per_request: float | None = None
    decode_s_per_kv_token: float | None = None
    kv_bytes_per_token: int | None = None
    transfer_bytes_per_s: float | None = None
    itl_target_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """The response to Describe. `lease_s` None: it creates no handles; `rendezvous_address` empty: it needs none.

    `rank_rendezvous_addresses`: of each data-parallel rank, in order; empty: all ranks share `rendezvous_address`.
    `requires_prefill`: it cannot compute prompts in its role.
    """

    worker: WorkerRef
    role: Role
    model: ModelCard
    capabilities: Capabilities
    kv_compatibility_hash: str
    block_size_tokens: int
    kv_blocks_total: int
    lease_s: float | None = None
    rendezvous_address: str = ""
    is_draining: bool = False
    profile: PerformanceProfile | None = None
    requires_prefill: bool = False
    rank_rendezvous_addresses: Sequence[str] = ()

    def rendezvous_address_of(self, rank: int) -> str:
        """host:port of the bootstrap server of a data-parallel rank; empty: there is none."""
        return self.rank_rendezvous_addresses[rank] if self.rank_rendezvous_addresses else self.rendezvous_address


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingKvPath:
    """A prefill worker whose KV a worker cannot pull. `reason` is one of KV_PATH_REASONS."""

    worker_id: str
    reason: str


KV_PATH_REASONS = frozenset(("unreachable", "timed_out", "loopback_address", "incompatible", "failed"))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPath:
    """Transfers from one prefill worker; fields as in `protos/kvmesh/worker/v1/worker.proto`."""

    worker_id: str
    pulls_total: int = 0
    failures_total: int = 0
    reason: str = ""
    detail: str = ""
    last_failure_at_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPathCheck:
    """The result of a check of a KV path. `reason` and `detail` are empty if KV was pulled."""

    is_ok: bool
    reason: str = ""
    detail: str = ""
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """Load of one worker after one engine step; fields as in `protos/kvmesh/types/v1/load.proto`."""

    worker_id: str = ""
    epoch: int = 0
    sequence: int = 0
    taken_at_s: float = 0.0
    step: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    waiting_prompt_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    kv_blocks_leased: int = 0
    running_requests_max: int = 0
    step_s: float = 0.0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    cached_tokens_total: int = 0
    transferred_tokens_total: int = 0
    data_parallel_rank: int = 0
    is_draining: bool = False
    preempted_requests_total: int = 0
    failing_kv_paths: Sequence[FailingKvPath] = ()
    failed_handoffs_total: int = 0
    recomputed_tokens_total: int = 0
    bootstrapping_requests: int = 0
    sending_requests: int = 0
    preallocating_requests: int = 0
    receiving_requests: int = 0
    retracted_requests: int = 0
    pulling_requests: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_held: int = 0
    kv_blocks_unaccounted: int | None = None
