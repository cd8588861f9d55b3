"""Makes the handle of a computed prompt, and verifies pulled blocks."""

import numpy as np

from kvmesh.core import KvHandle
from kvmesh.engines.simulated.handles import FORMAT, HandlePayload, pack
from kvmesh.engines.simulated.leg_state import SimulatedLeg
from kvmesh.engines.simulated.memory import KvMemory, Numbers, Run, are_neighbours, runs_of, words_of
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.engines.simulated.step import PullOrder


def make_payload(leg: SimulatedLeg, *, peer: bytes, memory: KvMemory) -> HandlePayload:
    """Returns where the KV of a computed prompt is."""
    _, stamps = memory.guards(leg.blocks)
    parts = memory.read_parts(leg.blocks) if leg.parts is None else leg.parts
    return HandlePayload(
        peer=peer,
        runs=_runs(leg.blocks, stamps.view(np.int64)),
        checksum=int(parts.sum()),
        cached_tokens=leg.cached_tokens,
    )


def make_handle(
    leg: SimulatedLeg,
    *,
    handle_id: str,
    peer: bytes,
    compatibility_hash: str,
    memory: KvMemory,
    settings: SimulatedSettings,
) -> KvHandle:
    """Returns the handle of a leg whose prompt is computed. The worker adds its id and epoch."""
    return KvHandle(
        handle_id=handle_id,
        format=FORMAT,
        compatibility_hash=compatibility_hash,
        payload=pack(make_payload(leg, peer=peer, memory=memory)),
        worker_id="",
        worker_epoch=0,
        tokens=leg.computed,
        lease_s=settings.lease_s,
        kv_bytes=len(leg.blocks) * settings.kv_bytes_per_block,
    )


def _runs(blocks: list[int], stamps: Numbers) -> list[Run]:
    if are_neighbours(blocks) and bool((stamps[1:] - stamps[:-1] == 1).all()):
        return [(blocks[0], len(blocks), int(stamps[0]))]
    return runs_of(np.array(blocks, np.int64), stamps)


def is_intact(order: PullOrder, *, tokens: int, memory: KvMemory, block_size_tokens: int) -> bool:
    """Returns True when every pulled block has the expected guard and stamp, and all together have the writer's checksum.

    Stores the blocks' checksums in `leg.parts`.
    """
    leg, payload, first = order.leg, order.payload, order.first
    blocks = leg.blocks[: len(payload)]
    guards, stamps = memory.guards(blocks[first:])
    full = tokens // block_size_tokens
    leg.parts = memory.read_parts(blocks)
    return (
        np.array_equal(stamps.view(np.int64), payload.stamps[first:])
        and np.array_equal(guards[: full - first], words_of(leg.names[first:full]))
        and int(leg.parts.sum()) == payload.checksum
    )
