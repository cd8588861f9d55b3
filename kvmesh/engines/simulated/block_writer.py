"""Writes blocks during a step: the checksum of their tokens, and the names of complete blocks."""

from collections.abc import Sequence

import numpy as np

from kvmesh.engines.simulated.blocks import BlockPool
from kvmesh.engines.simulated.leg_state import SimulatedLeg
from kvmesh.engines.simulated.memory import WORD_MASK, KvMemory
from kvmesh.kv.blocks import block_hashes, chain_hash

_PARTIAL = b"partial"


def names_of(leg: SimulatedLeg, block_size_tokens: int) -> list[int]:
    """Hashes of all full blocks of a leg's tokens, computed or not."""
    return block_hashes(leg.tokens, block_size_tokens, seed=leg.seed_hash)


def compute_prompt(leg: SimulatedLeg, *, take: int, memory: KvMemory, pool: BlockPool, block_size_tokens: int) -> None:
    """Writes the KV of the next `take` tokens and names blocks that become full."""
    # A block that was computed in part is written again as a whole.
    first, end = leg.computed // block_size_tokens, leg.computed + take
    last = -(-end // block_size_tokens)
    start = first * block_size_tokens
    tokens = np.frombuffer(leg.tokens[start:end], np.uint32).astype(np.uint64)
    tokens *= np.arange(start + 1, end + 1, dtype=np.uint64)
    parts = np.add.reduceat(tokens, np.arange(0, end - start, block_size_tokens))
    full = end // block_size_tokens
    guards = leg.names[first:full]
    if full < last:
        # The guard of an incomplete block differs from the name of any complete one.
        tail = leg.tokens[full * block_size_tokens : end].tobytes()
        guards.append(chain_hash(leg.names[full - 1] if full else leg.seed_hash, tail, extra=_PARTIAL))
    memory.write(leg.blocks[first:last], guards, parts)
    if full > leg.named_blocks:
        names = leg.names[leg.named_blocks : full]
        parent = leg.names[leg.named_blocks - 1] if leg.named_blocks else None
        pool.name(leg.blocks, leg.named_blocks, names, parent=parent)
        leg.named_blocks = full
    leg.computed = end
    if first:
        # The last of the earlier parts may be of the incomplete block that was written again.
        leg.parts = None if leg.parts is None else np.concatenate((leg.parts[:first], parts))
    else:
        leg.parts = parts


def seal_blocks(
    legs: Sequence[SimulatedLeg], *, totals: Sequence[int], memory: KvMemory, pool: BlockPool, block_size_tokens: int
) -> None:
    """Completes blocks that decoding legs have just filled, unless they are complete already.

    A total covers all tokens of its leg. The newest token is not computed yet and belongs to the next block.
    """
    for leg, total in zip(legs, totals, strict=True):
        tokens = leg.tokens
        length = len(tokens) - 1
        index = length // block_size_tokens - 1
        if index < leg.named_blocks:
            continue
        # The block's checksum is the rest of the total without the newest token and without the earlier blocks (and the leg's constant).
        part = total - (length + 1) * tokens[-1] - leg.named_sum
        parent = leg.names[index - 1] if index else None
        body = tokens[index * block_size_tokens : length].tobytes()
        name = chain_hash(leg.seed_hash if parent is None else parent, body)
        leg.names.append(name)
        leg.named_blocks += 1
        leg.named_sum += part
        memory.write_one(leg.blocks[index], guard=name, part=part & WORD_MASK)
        pool.name_one(leg.blocks, place=index, name=name, parent=parent)
