"""The KV cache: blocks with chained hashes, shared by requests, evicted from the ends of chains."""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_intdigest


@dataclass(slots=True)
class Block:
    """A cached block."""

    parent: int | None
    holders: int = 0
    children: int = 0
    used_at: int = 0


@dataclass(slots=True)
class Hold:
    """The blocks of one request: the hashes of shared ones, and the number of private ones."""

    shared: list[int] = field(default_factory=list)
    own: int = 0


class Cache:
    """All blocks of an engine, and the events of its changes."""

    def __init__(self, blocks: int, size: int, events_max: int) -> None:
        self.total, self.size = blocks, size
        self.events: deque[dict[str, Any]] = deque(maxlen=events_max or None)
        self._has_events = bool(events_max)
        self._blocks: dict[int, Block] = {}
        self._own = 0
        self._numbers = itertools.count()
        self._ticks = itertools.count()
        self._emit({"type": "created", "num_blocks_per_cache_level": [blocks, 0]})

    @property
    def used(self) -> int:
        return self._own + sum(1 for block in self._blocks.values() if block.holders)

    def has_room(self, tokens: int) -> bool:
        return self.used + -(-tokens // self.size) <= self.total

    def hashes(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Returns the hashes of the full blocks."""
        found, parent = [], xxh3_64_intdigest(salt.encode())
        for start in range(0, len(tokens) - self.size + 1, self.size):
            body = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + self.size])
            parent = xxh3_64_intdigest(body, parent)
            found.append(parent)
        return found

    def hold(self, tokens: Sequence[int], salt: str, *, reuses: bool) -> tuple[Hold, int]:
        """Takes blocks for a prompt. Returns them and the number of cached tokens. The last token is always computed."""
        hold = Hold()
        for each in self.hashes(tokens[:-1], salt) if reuses else ():
            if each not in self._blocks:
                break
            self._take(each)
            hold.shared.append(each)
        cached = len(hold.shared) * self.size
        self.grow(hold, len(tokens))
        return hold, cached

    def grow(self, hold: Hold, tokens: int) -> None:
        """Takes further blocks until `tokens` fit."""
        more = -(-tokens // self.size) - len(hold.shared) - hold.own
        if more > 0:
            hold.own, self._own = hold.own + more, self._own + more
            self._evict()

    def commit(self, hold: Hold, tokens: Sequence[int], salt: str) -> None:
        """Shares the full blocks of a computed prefix."""
        stored = []
        for index, each in enumerate(self.hashes(tokens, salt)):
            if index < len(hold.shared):
                continue
            parent = hold.shared[-1] if hold.shared else None
            hold.own, self._own = hold.own - 1, self._own - 1
            if each not in self._blocks:
                self._blocks[each] = Block(parent)
                if parent is not None:
                    self._blocks[parent].children += 1
                stored.append((each, parent, tokens[index * self.size : (index + 1) * self.size]))
            self._take(each)
            hold.shared.append(each)
        tail = tokens[len(hold.shared) * self.size :]
        if stored:
            blocks = [_described(each, part) for each, _, part in stored]
            if tail:
                # Like the real engine, also announces the block that is still being filled.
                blocks.append(_described(stored[-1][0] ^ 1, tail))
            self._emit({"type": "stored", "parent_hash": stored[0][1], "blocks": blocks})

    def free(self, hold: Hold) -> None:
        for each in hold.shared:
            block = self._blocks[each]
            block.holders -= 1
            block.used_at = next(self._ticks)
        self._own -= hold.own
        hold.shared, hold.own = [], 0

    def _take(self, each: int) -> None:
        self._blocks[each].holders += 1

    def _evict(self) -> None:
        while len(self._blocks) + self._own > self.total:
            free = [(b.used_at, each) for each, b in self._blocks.items() if not b.holders and not b.children]
            _, each = min(free)
            parent = self._blocks.pop(each).parent
            if parent is not None:
                self._blocks[parent].children -= 1
            self._emit({"type": "removed", "block_hashes": [each]})

    def _emit(self, data: dict[str, Any]) -> None:
        if self._has_events:
            self.events.append({"event_id": next(self._numbers), "data": data, "window_size": 4096})


def _described(block_hash: int, tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "type": "stored_block",
        "block_hash": block_hash,
        "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
        "cache_level": 0,
        "priority": 35,
        "mm_keys": [],
    }
