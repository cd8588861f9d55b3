"""The interface of engines. One adapter package per engine implements `Engine`; `tests/conformance` tests each of them.

An engine runs steps; after each step it yields one StepOutput for all its requests. Nothing is done per request per token
outside the step. A request is named by `key`, an integer that the worker chooses and that is free again after its finish.

Invariants every adapter keeps:
1. Each accepted submit is answered by exactly one EngineFinish, in a StepOutput, whatever happens, cancel included.
2. Tokens of a request come in order, before or in the same StepOutput as its finish, and never after it.
3. A cancel frees the request's blocks within one step (250 ms); a cancelled prefill leaves no lease. Blocks that a running transfer
   writes to are freed when the transfer ends.
4. A handle that is expired, from another epoch, or of another compatibility hash is never read: the prompt is computed instead
   (`was_recomputed`), or the request refused. The same holds for a pull that does not end within its deadline, and for one whose
   blocks were not held until its last byte came.
5. A handed-out handle's blocks are freed when pulled, released, or `lease_s` after it was made.
6. KV events come in the order of the changes, none lost; replaying them from the start gives the set of cached blocks.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.core import (
    Capabilities,
    KvEvent,
    Leg,
    LegFinish,
    LoadRecord,
    ModelCard,
    PerformanceProfile,
    Role,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest(Leg):
    """A leg under the worker's key."""

    key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFinish(LegFinish):
    """The end of the leg under `key`.

    `queue_s`: time from submit to the step that began to compute the prompt; 0 where none did.
    """

    key: int
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The result of one engine step: entry i is request `keys[i]` with the next `counts[i]` ids of `token_ids`.

    `counts` None means one token per entry. `logprobs` holds, for keys that asked, one TokenLogprob per token of the entry.
    A prefill leg has no entry, only a finish. The lists belong to the receiver. `prompt_logprobs` holds, for keys that asked,
    one TokenLogprob per prompt token from the second on; once per leg, not after its first token's step, and not for legs
    that continue emitted tokens.
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
    """What an engine is, known after `start`.

    `kv_compatibility_hash` covers everything that must be equal for two engines to exchange KV: weights, dtype,
    block size, layout, tensor shape, engine and connector version. `rendezvous_address` is host:port or empty.
    """

    model: ModelCard
    capabilities: Capabilities
    role: Role
    block_size_tokens: int
    kv_blocks_total: int
    kv_compatibility_hash: str
    lease_s: float
    rendezvous_address: str = ""
    profile: PerformanceProfile | None = None
    """Its speed, if the engine knows it."""
    removes_kv_from_ends: bool = False
    """Its KV events never store a block that is stored, and remove none before those that follow it."""


class Engine(Protocol):
    """An inference engine behind one worker. All methods run on the worker's event loop; none blocks it for long."""

    async def start(self) -> None:
        """Loads the model. Raises a MeshError that says what is missing. Cancelling it leaves nothing behind."""
        ...

    def describe(self) -> EngineDescription:
        """What the engine is. After `start` only."""
        ...

    def submit_nowait(self, request: EngineRequest) -> None:
        """Accepts a leg or raises: InvalidRequestError, NotFoundError (adapter), UnsupportedError, OverloadedError,
        UnavailableError, KvLostError (a handle that can never be read here). A refused leg has left no trace."""
        ...

    def cancel_nowait(self, key: int) -> None:
        """Stops a leg; its CANCELLED finish follows. Unknown keys are ignored, since the finish may have crossed."""
        ...

    def release_nowait(self, handle_id: str) -> bool:
        """Frees a handed-out handle's blocks. False: unknown, pulled or expired."""
        ...

    def leased_handles(self) -> int:
        """How many handed-out handles hold blocks: neither pulled, nor released, nor expired."""
        ...

    def steps(self) -> AsyncIterator[StepOutput]:
        """All step outputs from the start, for one consumer. Raises LostError when the engine dies; ends after `aclose`."""
        ...

    async def deliver(self, take: Callable[[StepOutput], None]) -> None:
        """Passes each output of `steps` to `take`, if possible in the same iteration of the event loop in which it is made.

        Raises the exceptions of `take`."""
        ...

    def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        """All cache changes from the start, as mesh block hashes (`kvmesh.kv.blocks`), for one consumer."""
        ...

    def load(self) -> LoadRecord:
        """The load after the newest step; worker_id, epoch, sequence and is_draining are filled in by the worker."""
        ...

    async def load_adapter(self, name: str, source: str) -> None:
        """Makes a LoRA adapter usable. UnsupportedError, NotFoundError or InvalidRequestError; the engine lives on."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Idempotent."""
        ...

    async def reset_cache(self) -> bool:
        """Evicts cached blocks without a holder. False: requests hold blocks and nothing was done."""
        ...

    async def sleep(self, level: int) -> None:
        """Frees what can be freed. UnsupportedError when the engine cannot."""
        ...

    async def wake(self) -> None:
        """Ends `sleep`."""
        ...

    async def set_role(self, role: Role) -> None:
        """Serves another pool from now on. UnsupportedError when the engine cannot."""
        ...

    async def aclose(self) -> None:
        """Ends everything: running legs finish as CANCELLED, processes and memory are gone. Idempotent, bounded."""
        ...
