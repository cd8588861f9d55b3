"""Finds the adapter and the tenant salt of cached blocks.

The engine's KV events name neither, so the first block of a stored chain is matched with the legs whose prompts begin with its tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

PREFIXES_MAX = 16384
"""First blocks that are remembered, some 400 bytes each. A forgotten one is not announced to the router."""


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
    """Seeds (`kvmesh.kv.blocks.seed_hash`) by the first block of prompts. All methods run on the event loop."""

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
        """The seed of a chain's first block; None: it is not known which of several tenants or adapters it belongs to."""
        claims = self._claims.get(tuple(token_ids[: self._size]), [])
        for claim in claims:
            if claim.hashes.get(rank) == engine_hash:
                return claim.seed
        free = [claim for claim in claims if rank not in claim.hashes]
        if not free or (len(free) > 1 and free[0].is_ambiguous):
            return None
        free[0].hashes[rank] = engine_hash
        return free[0].seed
