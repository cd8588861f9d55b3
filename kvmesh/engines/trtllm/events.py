"""Translates the engine's KV events. The mesh's block hashes are computed from the token ids in the events, and from the legs that ran."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvmesh.core import KvEvent, KvTier
from kvmesh.engines.event_translator import EventTranslator

PREFIXES_MAX = 16384
"""First blocks that are remembered, some 400 bytes each. A forgotten one is not announced to the router."""
Hash = int | str | bytes
TIERS = (KvTier.DEVICE, KvTier.HOST, KvTier.DISK)
"""By the engine's cache level."""


@dataclass(slots=True, kw_only=True)
class SeedClaim:
    """Legs with one seed. `is_ambiguous`: they ran while legs with another seed did, so the order of their events is unknown.

    `hashes` are the engine's hashes of the block by data-parallel rank.
    """

    seed: int
    running: int = 0
    is_ambiguous: bool = False
    hashes: dict[int, int | str | bytes] = field(default_factory=dict)


class SeedClaims:
    """Seeds (`kvmesh.kv.blocks.seed_hash`) by the first block of prompts: finds the adapter and the tenant salt of cached blocks.

    The engine's KV events name neither, so the first block of a stored chain is matched with the legs whose prompts begin with its tokens.
    All methods run on the event loop.
    """

    def __init__(self, block_size_tokens: int, prefixes_max: int = PREFIXES_MAX) -> None:
        self._size = block_size_tokens
        self._prefixes_max = prefixes_max
        self._claims: OrderedDict[tuple[int, ...], list[SeedClaim]] = OrderedDict()

    def begin(self, token_ids: Sequence[int], seed: int) -> None:
        """A leg with this prompt was submitted."""
        prefix = tuple(token_ids[: self._size])
        claims = self._claims.setdefault(prefix, [])
        self._claims.move_to_end(prefix)
        claim = next((each for each in claims if each.seed == seed), None)
        if claim is None:
            claim = SeedClaim(seed=seed)
            claims.append(claim)
        others = [each for each in claims if each is not claim and not each.hashes]
        if not claim.hashes and any(each.running for each in others):
            for each in (claim, *others):
                each.is_ambiguous = True
        claim.running += 1
        while len(self._claims) > self._prefixes_max:
            self._claims.popitem(last=False)

    def end(self, token_ids: Sequence[int], seed: int) -> None:
        """A leg ended."""
        for claim in self._claims.get(tuple(token_ids[: self._size]), ()):
            if claim.seed == seed and claim.running:
                claim.running -= 1

    def assign(self, token_ids: Sequence[int], engine_hash: int | str | bytes, rank: int = 0) -> int | None:
        """Returns the seed of a chain's first block; None: it is not known which of several tenants or adapters it belongs to."""
        claims = self._claims.get(tuple(token_ids[: self._size]), [])
        for claim in claims:
            # The block was evicted and stored again.
            if claim.hashes.get(rank) == engine_hash:
                return claim.seed
        # Legs that did not run at the same time store their blocks in the order of their submission, which is that of the claims.
        free = [claim for claim in claims if rank not in claim.hashes]
        if not free or (len(free) > 1 and free[0].is_ambiguous):
            return None
        free[0].hashes[rank] = engine_hash
        return free[0].seed


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Blocks of one level, each the child of the one before. Without `token_ids` they are known and moved to this level."""

    block_hashes: Sequence[Any]
    tier: KvTier
    parent_block_hash: Any = None
    token_ids: Sequence[int] = ()
    block_size: int = 0
    chain_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks that left a level."""

    block_hashes: Sequence[Any]
    tier: KvTier


class RankTranslator(EventTranslator):
    """The blocks of one data-parallel rank, and the level of each."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.tiers: dict[Hash, KvTier] = {}

    def is_counted(self, event: Any) -> bool:
        """Returns True: events that do not count are not passed on."""
        return True

    def seed(self, event: Any) -> int:
        return int(event.chain_seed)

    def tier(self, event: Any) -> KvTier:
        tier: KvTier = event.tier
        return tier


class TrtllmEvents:
    """Translates events of all ranks, as `get_kv_cache_events_async` yields them.

    Trailing partial blocks are dropped, and chains of an unknown tenant or adapter are not announced. With several windows only the
    largest counts. The engine numbers its events and cannot repeat them: after a gap the rank's blocks count as gone.
    """

    def __init__(self, block_size_tokens: int, claims: SeedClaims) -> None:
        self._size = block_size_tokens
        self._claims = claims
        self._ranks: dict[int, RankTranslator] = {}
        self._numbers: dict[int, int] = {}
        self._window = 0

    def translate(self, event: Mapping[str, Any]) -> list[KvEvent]:
        rank = int(event.get("attention_dp_rank") or 0)
        found = self._after_gap(rank, number=event.get("event_id"))
        data, window = event["data"], int(event.get("window_size") or 0)
        self._window = max(self._window, window)
        handle = self._handlers().get(data["type"])
        if handle is not None and window in (0, self._window):
            found += handle(self._ranks.setdefault(rank, RankTranslator(rank)), data)
        return [replace(each, data_parallel_rank=rank) for each in found]

    def snapshot(self) -> list[KvEvent]:
        """Events that lead to the present state."""
        return [
            replace(each, data_parallel_rank=rank)
            for rank, translator in self._ranks.items()
            for each in translator.snapshot()
        ]

    def _handlers(self) -> Mapping[str, Callable[[RankTranslator, Any], list[KvEvent]]]:
        return {"stored": self._stored, "removed": _removed, "updated": _updated, "cleared": _cleared}

    def _after_gap(self, rank: int, number: int | None) -> list[KvEvent]:
        if number is None:
            return []
        before, self._numbers[rank] = self._numbers.get(rank), number
        if before is None or number == before + 1 or rank not in self._ranks:
            return []
        return _cleared(self._ranks[rank], {})

    def _stored(self, translator: RankTranslator, data: Any) -> list[KvEvent]:
        blocks = full_blocks(data["blocks"], self._size)
        if not blocks:
            return []
        parent, seed = data.get("parent_hash"), 0
        if parent is None:
            known = self._claims.assign(token_ids(blocks[0]), blocks[0]["block_hash"], translator.rank)
            if known is None:
                return []
            seed = known
        found: list[KvEvent] = []
        for block in blocks:
            tier = tier_of(block.get("cache_level"))
            if translator.tiers.get(block["block_hash"]) == tier:
                parent = block["block_hash"]
                continue
            event = BlockStored(
                block_hashes=[block["block_hash"]],
                parent_block_hash=parent,
                token_ids=token_ids(block),
                block_size=self._size,
                chain_seed=seed,
                tier=tier,
            )
            found += translator.translate([event])
            translator.tiers[block["block_hash"]] = tier
            parent = block["block_hash"]
        return found


def _removed(translator: RankTranslator, data: Any) -> list[KvEvent]:
    found: list[KvEvent] = []
    for block_hash in data["block_hashes"]:
        tier = translator.tiers.pop(block_hash, None)
        if tier is not None:
            found += translator.translate([BlockRemoved(block_hashes=[block_hash], tier=tier)])
    return found


def _updated(translator: RankTranslator, data: Any) -> list[KvEvent]:
    """Returns a block moved to another level. Changes of its priority do not matter."""
    block_hash, change = data["block_hash"], data.get("cache_level")
    before = translator.tiers.get(block_hash)
    if change is None or before is None:
        return []
    tier = translator.tiers[block_hash] = tier_of(change["new_value"])
    # Stored before removed: the translator forgets a block's name with its last copy.
    moved = BlockStored(block_hashes=[block_hash], tier=tier)
    return translator.translate([moved, BlockRemoved(block_hashes=[block_hash], tier=before)])


def _cleared(translator: RankTranslator, _: Any) -> list[KvEvent]:
    # The base class translates this name to KvCleared and forgets all blocks.
    translator.tiers.clear()
    return translator.translate([AllBlocksCleared()])


class AllBlocksCleared:
    """All blocks of the rank are gone."""


def full_blocks(blocks: Sequence[Any], size: int) -> Sequence[Any]:
    """Returns the blocks before the first partial one, which requests still fill."""
    number = next((index for index, block in enumerate(blocks) if len(block["tokens"]) < size), len(blocks))
    return blocks[:number]


def token_ids(block: Any) -> list[int]:
    return [int(token["token_id"]) for token in block["tokens"]]


def tier_of(level: int | None) -> KvTier:
    return TIERS[min(level or 0, len(TIERS) - 1)]
