"""Translates the cache events of an engine. The mesh's block hashes are computed from the token ids in the events."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvmesh.core import KvCleared, KvEvent, KvRemoved, KvStored, KvTier
from kvmesh.kv.blocks import block_hashes


class EventTranslator(ABC):
    """Maps engine hashes to mesh hashes and counts copies per tier, since an engine may store a block twice and announce both.

    Events have the names and fields of vLLM's and SGLang's: `BlockStored`, `BlockRemoved`, `AllBlocksCleared`. Not thread-safe.
    """

    def __init__(self) -> None:
        self._names: dict[bytes | int, tuple[int, int | None]] = {}
        self._copies: dict[tuple[KvTier, bytes | int], int] = {}

    @abstractmethod
    def is_counted(self, event: Any) -> bool:
        """Returns whether the event's blocks count."""

    @abstractmethod
    def seed(self, event: Any) -> int:
        """Returns the start of the hash chain of a stored run without a parent."""

    @abstractmethod
    def tier(self, event: Any) -> KvTier:
        """Returns where the event's blocks are."""

    def translate(self, events: Sequence[Any]) -> list[KvEvent]:
        """Events in order. Changes that do not alter the set of cached blocks produce none."""
        found: list[KvEvent] = []
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self._names.clear()
                self._copies.clear()
                found.append(KvCleared())
            elif self.is_counted(event):
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
        tier = self.tier(event)
        first = None if event.parent_block_hash is None else parent
        runs: list[KvEvent] = []
        run: list[int] = []
        run_parent = before = first
        for engine_hash, name in zip(event.block_hashes, names, strict=True):
            self._names.setdefault(engine_hash, (name, before))
            copies = self._copies.get((tier, engine_hash), 0)
            self._copies[tier, engine_hash] = copies + 1
            if copies:
                # A block that is stored already is not announced again. It ends the run, and the rest follows it.
                runs += [KvStored(block_hashes=run, parent_hash=run_parent, tier=tier)] if run else []
                run, run_parent = [], name
            else:
                run.append(name)
            before = name
        return [*runs, KvStored(block_hashes=run, parent_hash=run_parent, tier=tier)] if run else runs

    def _stored_again(self, event: Any) -> list[KvEvent]:
        """Handles blocks that offloading announces without tokens. Blocks with an unknown hash are ignored."""
        tier, runs = self.tier(event), []
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
            return self.seed(event)
        known = self._names.get(event.parent_block_hash)
        return known[0] if known else None

    def _removed(self, event: Any) -> list[KvEvent]:
        tier = self.tier(event)
        gone: list[int] = []
        for engine_hash in event.block_hashes:
            copies = self._copies.pop((tier, engine_hash), 0)
            if copies > 1:
                self._copies[tier, engine_hash] = copies - 1
            elif copies == 1:
                gone.append(self._names[engine_hash][0])
                # The name is needed as long as a copy is left in another tier.
                if not any((other, engine_hash) in self._copies for other in KvTier):
                    del self._names[engine_hash]
        return [KvRemoved(block_hashes=gone, tier=tier)] if gone else []
