"""Translates vLLM's cache events. Block hashes of the mesh are computed from the token ids of the events."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.core import KvCleared, KvEvent, KvRemoved, KvStored, KvTier
from kvmesh.engines.vllm.adapters import mesh_name
from kvmesh.kv.blocks import block_hashes, seed_hash

TIERS: Mapping[str | None, KvTier] = {
    None: KvTier.DEVICE,
    "GPU": KvTier.DEVICE,
    "CPU": KvTier.HOST,
    "STORAGE": KvTier.DISK,
}


REMOTE_TIERS: Mapping[str | None, KvTier] = {"CPU": KvTier.PEER, "STORAGE": KvTier.OBJECT}
"""The same media when they are not the worker's own."""

FULL_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""vLLM's kinds of cache groups that keep the blocks of the whole prefix (`KVCacheSpecKind`)."""


def prefix_group(kinds: Sequence[str]) -> int:
    """The group whose blocks tell how much of a prefix is cached: the first that keeps all of it.

    Groups with a window, chunks or a state free what lies behind, so that their blocks say nothing about the prefix. A model
    that has only such groups is told by its first one: what is told is then less than what the engine can use, never more.
    """
    return next((number for number, kind in enumerate(kinds) if kind in FULL_PREFIX_KINDS), 0)


class EventTranslator:
    """Keeps, per tier, engine hash -> mesh hash with a count, since vLLM may hold the same block twice and announces both.

    Only one KV cache group counts, see `prefix_group`: the groups of a hybrid model name the same tokens. Not thread-safe.
    """

    def __init__(self, group: int = 0) -> None:
        self._group = group
        self._names: dict[bytes | int, tuple[int, int | None]] = {}
        self._copies: dict[tuple[KvTier, bytes | int], int] = {}

    def count_group(self, group: int) -> None:
        """Says which group counts; before the first event."""
        self._group = group

    def translate(self, events: Sequence[Any]) -> list[KvEvent]:
        """Events in order; changes that leave the set of cached blocks as it is give nothing."""
        found: list[KvEvent] = []
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self._names.clear()
                self._copies.clear()
                found.append(KvCleared())
            elif event.group_idx in (None, self._group):
                found.extend(self._stored(event) if kind == "BlockStored" else self._removed(event))
        return found

    def snapshot(self) -> list[KvEvent]:
        """Events that give the present set from nothing, parents first (names are kept in the order of storing)."""
        events: list[KvEvent] = [KvCleared()]
        for engine_hash, (name, parent) in self._names.items():
            events += [
                KvStored(block_hashes=[name], parent_hash=parent, tier=tier)
                for tier in KvTier
                if (tier, engine_hash) in self._copies
            ]
        return events

    def __len__(self) -> int:
        return len(self._copies)

    def _stored(self, event: Any) -> list[KvEvent]:
        if not event.token_ids or len(event.token_ids) != event.block_size * len(event.block_hashes):
            return self._stored_again(event)
        parent = self._parent(event)
        if parent is None:
            return []
        names = block_hashes(event.token_ids, event.block_size, seed=parent)
        tier = tier_of(event)
        first = None if event.parent_block_hash is None else parent
        runs: list[KvEvent] = []
        run: list[int] = []
        run_parent = before = first
        for engine_hash, name in zip(event.block_hashes, names, strict=True):
            self._names.setdefault(engine_hash, (name, before))
            copies = self._copies.get((tier, engine_hash), 0)
            self._copies[tier, engine_hash] = copies + 1
            if copies:
                runs += [KvStored(block_hashes=run, parent_hash=run_parent, tier=tier)] if run else []
                run, run_parent = [], name
            else:
                run.append(name)
            before = name
        return [*runs, KvStored(block_hashes=run, parent_hash=run_parent, tier=tier)] if run else runs

    def _stored_again(self, event: Any) -> list[KvEvent]:
        """Offloading tells some blocks without their tokens: known ones have a name, others cannot be told of."""
        tier, runs = tier_of(event), []
        for engine_hash in event.block_hashes:
            if engine_hash not in self._names:
                continue
            copies = self._copies.get((tier, engine_hash), 0)
            self._copies[tier, engine_hash] = copies + 1
            if not copies:
                name, parent = self._names[engine_hash]
                runs.append(KvStored(block_hashes=[name], parent_hash=parent, tier=tier))
        return list(runs)

    def _parent(self, event: Any) -> int | None:
        if event.parent_block_hash is None:
            return seed_hash(mesh_name(event.lora_name or ""), salt_of(event))
        known = self._names.get(event.parent_block_hash)
        return known[0] if known else None

    def _removed(self, event: Any) -> list[KvEvent]:
        tier = tier_of(event)
        gone: list[int] = []
        for engine_hash in event.block_hashes:
            copies = self._copies.pop((tier, engine_hash), 0)
            if copies > 1:
                self._copies[tier, engine_hash] = copies - 1
            elif copies == 1:
                gone.append(self._names[engine_hash][0])
                if not any((other, engine_hash) in self._copies for other in KvTier):
                    del self._names[engine_hash]
        return [KvRemoved(block_hashes=gone, tier=tier)] if gone else []


def tier_of(event: Any) -> KvTier:
    """Where the event's blocks lie. A medium that is new to the mesh counts as the engine's own memory."""
    if getattr(event, "locality", None) == "REMOTE" and event.medium in REMOTE_TIERS:
        return REMOTE_TIERS[event.medium]
    return TIERS.get(event.medium, KvTier.DEVICE)


def salt_of(event: Any) -> str:
    """The cache salt among the first block's extra keys: the string that is not the adapter's name."""
    keys = list(event.extra_keys[0] or ()) if event.extra_keys else []
    if event.lora_name and event.lora_name in keys:
        keys.remove(event.lora_name)
    return next((key for key in keys if isinstance(key, str)), "")
