"""Cards of workers: model and features, as the registry has them. Which workers serve a model with the same files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.checks import is_whole_number
from kvmesh.core import Handoff, ModelCard, Role
from kvmesh.discovery.base import Instance
from kvmesh.errors import UnsupportedError

CARD_PREFIX = "kvmesh/workers/"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCard(ModelCard):
    """A worker's model and features, as the worker writes them to the registry's key-value store."""

    features: Sequence[str] = ()
    handoffs: Sequence[Handoff] = ()
    rendezvous_address: str = ""
    requires_prefill: bool = False


Described = tuple[Instance, WorkerCard]
"""A worker in the registry, and its card."""


def read_card(value: bytes) -> WorkerCard:
    """Parses a card. Raises UnsupportedError if it is malformed."""
    try:
        record = json.loads(value)
        return WorkerCard(
            name=str(record["name"]),
            source=str(record["source"]),
            context_tokens_max=int(record["context_tokens_max"]),
            vocabulary_size=int(record["vocabulary_size"]),
            revision=str(record.get("revision") or ""),
            files_digest=str(record.get("files_digest") or ""),
            eos_token_ids=tuple(int(each) for each in record.get("eos_token_ids") or ()),
            adapters=_words(record.get("adapters")),
            features=_words(record.get("features")),
            handoffs=tuple(each for each in Handoff if each.value in _words(record.get("handoffs"))),
            rendezvous_address=str(record.get("rendezvous_address") or ""),
            requires_prefill=bool(record.get("requires_prefill")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedError(f"a worker's card cannot be read: {error!r}", reason="bad_card") from error


def _words(value: Any) -> tuple[str, ...]:
    return tuple(str(each) for each in value or ())


def by_digest(described: Sequence[Described]) -> Sequence[Sequence[Described]]:
    """Groups workers by the digest of their model's files, the preferred group first.

    Groups without a decode worker are omitted. The preferred group has the most decode workers; in a tie, the newest worker. So every
    frontend makes the same choice, and changes it during a rolling update before the last worker of the old files leaves.
    """
    groups: dict[str, list[Described]] = {}
    for each in described:
        groups.setdefault(each[1].files_digest, []).append(each)

    def preference(group: Sequence[Described]) -> tuple[int, int]:
        decoders = [instance for instance, _ in group if is_decoder(instance)]
        return len(decoders), max(_epoch(each) for each in decoders)

    served = [group for group in groups.values() if any(is_decoder(instance) for instance, _ in group)]
    return sorted(served, key=preference, reverse=True)


def is_decoder(instance: Instance) -> bool:
    return instance.meta.get("role", "decode") == Role.DECODE.value


def _epoch(instance: Instance) -> int:
    text = instance.meta.get("epoch", "")
    return int(text) if is_whole_number(text) else 0
