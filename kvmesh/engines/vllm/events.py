"""vLLM's cache events."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.core import KvTier
from kvmesh.engines.adapters import name_of
from kvmesh.engines.event_translator import EventTranslator
from kvmesh.kv.blocks import seed_hash

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
    """Returns the group whose blocks show how much of a prefix is cached: the first one that keeps the whole prefix.

    Groups with a window, chunks or a state free earlier blocks, so their blocks say nothing about the prefix. For a model with only
    such groups the first one is used: the announced blocks are then fewer than the engine can use, never more.
    """
    return next((number for number, kind in enumerate(kinds) if kind in FULL_PREFIX_KINDS), 0)


class VllmEvents(EventTranslator):
    """Counts one KV cache group only, see `prefix_group`: the groups of a hybrid model announce the same tokens."""

    def __init__(self, group: int = 0) -> None:
        super().__init__()
        self._group = group

    def count_group(self, group: int) -> None:
        """Sets the group that counts. Call it before the first event."""
        self._group = group

    def is_counted(self, event: Any) -> bool:
        return event.group_idx in (None, self._group)

    def seed(self, event: Any) -> int:
        return seed_hash(adapter=name_of(event.lora_name or ""), cache_salt=salt_of(event))

    def tier(self, event: Any) -> KvTier:
        return tier_of(event)


def tier_of(event: Any) -> KvTier:
    """Returns the tier of the event's blocks. An unknown medium counts as the engine's own memory."""
    if getattr(event, "locality", None) == "REMOTE" and event.medium in REMOTE_TIERS:
        return REMOTE_TIERS[event.medium]
    return TIERS.get(event.medium, KvTier.DEVICE)


def salt_of(event: Any) -> str:
    """Returns the cache salt: among the first block's extra keys the string that is not the adapter's name."""
    keys = list(event.extra_keys[0] or ()) if event.extra_keys else []
    if event.lora_name and event.lora_name in keys:
        keys.remove(event.lora_name)
    return next((key for key in keys if isinstance(key, str)), "")
