"""The interface of engines. Each adapter package implements `Engine`; `tests/conformance` tests all of them.

An engine runs steps and yields one StepOutput per step for all its requests. `key` is an integer that the worker chooses for a request.
The worker may use it again after the request's finish.

Invariants every adapter keeps:
1. Each accepted request gets exactly one EngineFinish, in a StepOutput, also after a cancel.
2. Tokens of a request come in order, before or in the same StepOutput as its finish, and never after it.
3. A cancel frees the request's blocks within one step (250 ms). A cancelled prefill leaves no lease. Blocks that a transfer is writing
   to are freed when the transfer ends.
4. A handle that has expired, or has another epoch or compatibility hash, is never read: the prompt is computed (`was_recomputed`), or
   the request is refused. The same holds for a pull that misses its deadline, or whose blocks were not held until its last byte
   arrived.
   Rendezvous handoff: a leg whose exchange with its counterpart fails ends with a KvLostError, within seconds, and its blocks are free.
5. A handed-out handle's blocks are freed when pulled, released, or `lease_s` after it was made.
6. KV events come in the order of the changes and none is lost. Replaying them from the start gives the set of cached blocks.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.core import (
    Capabilities,
    KvEvent,
    KvHandle,
    Leg,
    LegFinish,
    LoadRecord,
    ModelCard,
    PerformanceProfile,
    Role,
    TokenLogprob,
)
from kvmesh.kv.paths import KvPaths

INTERNAL_SALT = "kvmesh-internal"
"""Cache salt of workers' own legs. It also keeps their blocks apart from those of clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest(Leg):
    """A leg with the worker's key."""

    key: int

    @property
    def is_internal(self) -> bool:
        """True for a worker's own leg: a warm-up or a check. Its tokens are in no counter of the load record."""
        return self.generation.cache_salt == INTERNAL_SALT


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFinish(LegFinish):
    """The end of the leg with this `key`.

    `queue_s` is the time from submit to the first step that computed the prompt; 0: there was none.
    """

    key: int
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The result of one engine step: entry i is request `keys[i]` with the next `counts[i]` ids of `token_ids`.

    `counts` None means one token per entry. A prefill leg has a finish but no entry. The receiver owns the lists.
    `logprobs` has one TokenLogprob per token of the entry, for requests that asked for them. `prompt_logprobs` has one per prompt token
    from the second on: once per leg, at the latest in the step of its first token, and not for legs that continue emitted tokens.
    """

    step: int
    keys: list[int]
    token_ids: list[int]
    counts: list[int] | None = None
    logprobs: Mapping[int, Sequence[TokenLogprob]] = field(default_factory=dict)
    finishes: Sequence[EngineFinish] = ()
    prompt_logprobs: Mapping[int, Sequence[TokenLogprob]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """An engine's properties, known after `start`.

    `kv_compatibility_hash` covers everything that must be equal for two engines to exchange KV: weights, dtype, block size, layout, tensor
    shape, engine and connector version. `rendezvous_address` is host:port of the prefill worker's bootstrap server,
    or empty; `rank_rendezvous_addresses` are those of data-parallel ranks that do not share it.
    `requires_prefill`: in its role it cannot compute prompts. `profile` is the engine's speed, if it knows it.
    `removes_kv_from_ends`: its KV events never store a block that is stored already, and remove a block only after those that follow it.
    """

    model: ModelCard
    capabilities: Capabilities
    role: Role
    block_size_tokens: int
    kv_blocks_total: int
    kv_compatibility_hash: str
    lease_s: float
    rendezvous_address: str = ""
    rank_rendezvous_addresses: Sequence[str] = ()
    requires_prefill: bool = False
    profile: PerformanceProfile | None = None
    removes_kv_from_ends: bool = False


class Engine(Protocol):
    """An inference engine behind one worker. All methods run on the worker's event loop; none blocks it for long."""

    async def start(self) -> None:
        """Loads the model. Raises a MeshError that names what is missing. Cancelling it releases everything."""
        ...

    def describe(self) -> EngineDescription:
        """Returns the engine's properties. Call it after `start` only."""
        ...

    def submit_nowait(self, request: EngineRequest) -> None:
        """Accepts a leg, or raises without side effects.

        InvalidRequestError, NotFoundError (adapter), UnsupportedError, OverloadedError, UnavailableError, or KvLostError (this engine can
        never read the handle).
        """
        ...

    def cancel_nowait(self, key: int) -> None:
        """Stops a leg. Its CANCELLED finish follows. Unknown keys are ignored: the leg may have just finished."""
        ...

    def release_nowait(self, handle_id: str) -> bool:
        """Frees a handed-out handle's blocks. False: unknown, pulled or expired."""
        ...

    def leased_handles(self) -> int:
        """Returns the number of handed-out handles that are neither pulled, nor released, nor expired."""
        ...

    def steps(self) -> AsyncIterator[StepOutput]:
        """Returns all step outputs from the start, for one consumer. Raises LostError when the engine dies; ends after `aclose`."""
        ...

    async def deliver(self, take: Callable[[StepOutput], None]) -> None:
        """Passes each output of `steps` to `take`, if possible in the same iteration of the event loop in which it is made.

        Raises the exceptions of `take`."""
        ...

    def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        """Returns all cache changes from the start, as mesh block hashes (`kvmesh.kv.blocks`), for one consumer."""
        ...

    def load(self) -> LoadRecord:
        """Returns the load after the newest step. The worker sets worker_id, epoch, sequence and is_draining."""
        ...

    def rank_loads(self) -> Sequence[LoadRecord]:
        """Returns the load of each data-parallel rank, in order. `load` is that of all together."""
        ...

    @property
    def is_responsive(self) -> bool:
        """False while the engine runs in another process that has been silent for too long.

        The worker then sends neither heartbeats nor load records, so that frontends and routers treat it like a silent worker.
        """
        ...

    @property
    def kv_paths(self) -> KvPaths:
        """The KV paths from prefill workers. Call it after `start` only."""
        ...

    def kv_source(self, handle: KvHandle) -> str | bytes:
        """Returns where one of its own handles says that the KV is: host:port of a side channel, or NIXL's metadata. Empty: it does not say."""
        ...

    async def load_adapter(self, name: str, source: str) -> None:
        """Loads a LoRA adapter. UnsupportedError, NotFoundError, InvalidRequestError or OverloadedError, which leave the engine intact."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Idempotent."""
        ...

    async def reset_cache(self) -> bool:
        """Evicts all cached blocks. False: requests hold blocks, and nothing was evicted."""
        ...

    async def sleep(self, level: int) -> None:
        """Frees memory. UnsupportedError when the engine cannot sleep."""
        ...

    async def wake(self) -> None:
        """Ends `sleep`."""
        ...

    async def set_role(self, role: Role) -> None:
        """Changes the pool that the engine serves. UnsupportedError when it cannot."""
        ...

    async def aclose(self) -> None:
        """Finishes running legs as CANCELLED and releases processes and memory. Idempotent, bounded."""
        ...
