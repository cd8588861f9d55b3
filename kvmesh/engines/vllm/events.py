"""Translates vLLM's cache events. The mesh's block hashes are computed from the token ids in the events."""

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
"""The same media on other machines."""
FULL_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of vLLM's cache groups that keep the blocks of the whole prefix (`KVCacheSpecKind`)."""


def prefix_group(kinds: Sequence[str]) -> int:
    """The group whose blocks show how much of a prefix is cached: the first one that keeps the whole prefix.

    Groups with a window, chunks or a state free earlier blocks, so their blocks say nothing about the prefix. For a model with only
    such groups the first one is used: the announced blocks are then fewer than the engine can use, never more.
    """
    return next((number for number, kind in enumerate(kinds) if kind in FULL_PREFIX_KINDS), 0)


class EventTranslator:
    """Maps engine hashes to mesh hashes and counts copies per tier, since vLLM may store a block twice and announce both.

    Only one KV cache group counts, see `prefix_group`: the groups of a hybrid model announce the same tokens. Not thread-safe.
    """

    def __init__(self, group: int = 0) -> None:
        self._group = group
        self._names: dict[bytes | int, tuple[int, int | None]] = {}
        self._copies: dict[tuple[KvTier, bytes | int], int] = {}

    def count_group(self, group: int) -> None:
        """Sets the group that counts. Call it before the first event."""
        self._group = group

    def translate(self, events: Sequence[Any]) -> list[KvEvent]:
        """Events in order. Changes that do not alter the set of cached blocks produce none."""
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
        """Events that lead to the present state, parents first (`_names` keeps the order of storing)."""
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
        """Handles blocks that offloading announces without tokens. Blocks with an unknown hash are ignored."""
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
    """The tier of the event's blocks. An unknown medium counts as the engine's own memory."""
    if getattr(event, "locality", None) == "REMOTE" and event.medium in REMOTE_TIERS:
        return REMOTE_TIERS[event.medium]
    return TIERS.get(event.medium, KvTier.DEVICE)


def salt_of(event: Any) -> str:
    """The cache salt: among the first block's extra keys the string that is not the adapter's name."""
    keys = list(event.extra_keys[0] or ()) if event.extra_keys else []
    if event.lora_name and event.lora_name in keys:
        keys.remove(event.lora_name)
    return next((key for key in keys if isinstance(key, str)), "")
