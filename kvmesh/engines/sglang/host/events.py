"""SGLang's cache events, translated in the engine process: the token ids need not travel."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.core import KvEvent, KvRemoved, KvStored, KvTier
from kvmesh.engines.event_translator import EventTranslator
from kvmesh.engines.sglang.messages import KvChange
from kvmesh.kv.blocks import seed_hash

TIERS: Mapping[str | None, KvTier] = {
    None: KvTier.DEVICE,
    "GPU": KvTier.DEVICE,
    "CPU_PINNED": KvTier.HOST,
    "DISK": KvTier.DISK,
    "EXTERNAL": KvTier.OBJECT,
}


class SglangEvents(EventTranslator):
    """SGLang has one cache, so all events count."""

    def is_counted(self, event: Any) -> bool:
        return True

    def seed(self, event: Any) -> int:
        return seed_hash(adapter=event.lora_name or "", cache_salt=event.cache_salt or "")

    def tier(self, event: Any) -> KvTier:
        return TIERS.get(event.medium, KvTier.DEVICE)


def to_changes(events: Sequence[KvEvent]) -> list[KvChange]:
    """Events as they are sent."""
    return [_to_change(event) for event in events]


def _to_change(event: KvEvent) -> KvChange:
    match event:
        case KvStored():
            return ("stored", list(event.block_hashes), event.parent_hash, event.tier.value)
        case KvRemoved():
            return ("removed", list(event.block_hashes), None, event.tier.value)
        case _:
            return ("cleared", [], None, "")
