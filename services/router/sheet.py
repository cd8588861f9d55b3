"""The costs of the `kv` policy for all candidates of both legs in one sweep over one array: the ordinary ask of an ordinary pool.

Both legs have the same form, so half as many array operations do: the larger of a time that passes and one that does not, plus a
rate times the tokens lacking, plus a batch's part. For prefill the first is the queue with the base, the rate that of computing.
For decode the first is the wait for a slot, the rate that of the transfer, which is the same for all since only pools in which
every pair is equally far have a sheet. A property test holds this equal to `KvPolicy` and `pairing.best_pair`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmesh.core import Ask
from services.router.board import (
    BASE,
    FLOOR,
    GROWTH,
    NEVER,
    NOTHING,
    PER_TOKEN,
    ROWS,
    SHARE,
    UNTIL,
    WAIT,
    Board,
    Floats,
    Positions,
)
from services.router.pairing import INFINITE, Pair, Selector
from services.router.policies import Candidates, LegKind, Policy
from services.router.target import Target
from services.router.topology import Group
from services.router.weighed import WeighedLeg

_PREFILL_ROWS = (UNTIL, FLOOR, PER_TOKEN, NOTHING, NOTHING, BASE)
_KINDS = (LegKind.PREFILL, LegKind.DECODE)
_DECODE_ROWS = (NEVER, WAIT, NOTHING, GROWTH, SHARE, NOTHING)


@dataclass(slots=True, eq=False)
class Swept:
    """What a sweep read and gave. `costs` has the prefill candidates first; those of decode lack the transfer's base."""

    ask: Ask
    now: float
    held: Floats | None
    line: tuple[float, float]
    cells: Floats
    costs: Floats
    preferred: tuple[int | None, int | None] = (None, None)
    """Places of the session's targets."""
    preference_s: float = 0.0


class Sheet:
    """One pool's. Columns of the board are looked up once; the pool is made anew when they change."""

    __slots__ = ("_board", "_by_target", "_factors", "_lookup", "decodes", "group", "prefills", "split")

    def __init__(self, group: Group, prefills: Sequence[Target], decodes: Sequence[Target], board: Board) -> None:
        self.group = group
        self.prefills, self.decodes = prefills, decodes
        self.split = len(prefills)
        self._board = board
        self._factors = np.zeros(2)
        self._by_target: dict[Target, int] = {}
        self._lookup: Positions = np.concatenate(
            (_cells(_PREFILL_ROWS, prefills, board), _cells(_DECODE_ROWS, decodes, board)), axis=1
        )

    def sweep(
        self, ask: Ask, now: float, held: Floats | None, line: tuple[float, float], delayed: tuple[float, float]
    ) -> Swept:
        """`line` as `Links.lines` has it for the distance of the pairs, `delayed` as `KvPolicy.delayed` gives it."""
        cells: Floats = self._board.flat.take(self._lookup)
        rates = cells[2]
        rates[self.split :] = line[1] * self.group.kv_bytes_per_token
        costs = cells[0] - now
        np.maximum(costs, cells[1], costs)
        if held is None:
            costs += rates * ask.prompt_tokens
        else:
            lacking = ask.prompt_tokens - held
            lacking *= rates
            costs += lacking
        self._factors[0], self._factors[1] = delayed
        costs += np.dot(self._factors, cells[3:5])
        return Swept(ask, now, held, line, cells, costs)

    def prefer(self, swept: Swept, pair: tuple[Target | None, Target], preference_s: float) -> None:
        """Everybody costs more than the pair of the ask's session, on a side on which its target is."""
        split = self.split
        swept.preferred = self._places(pair)
        for place, part in zip(swept.preferred, (slice(0, split), slice(split, None)), strict=True):
            if place is not None:
                swept.costs[part] += preference_s
                swept.costs[place] -= preference_s
        swept.preference_s = preference_s

    def best(self, swept: Swept, selector: Selector) -> Pair | None:
        """The cheapest pair, as `pairing.best_pair` finds it; None when all are full."""
        split, held, costs = self.split, swept.held, swept.costs
        firsts, seconds = costs[:split], costs[split:]
        prefill, decode = int(firsts.argmin()), int(seconds.argmin())
        least_first, least_second = firsts.item(prefill), seconds.item(decode)
        base_s, s_per_byte = swept.line
        margin = selector.tie_ratio * (least_first + least_second + base_s)
        if least_first + least_second == INFINITE:
            return None
        held_first, held_second = (None, None) if held is None else (held[:split], held[split:])
        decode = selector.near(seconds, decode, least_second, margin, held_second, self.decodes)
        prefill = selector.near(firsts, prefill, least_first, margin, held_first, self.prefills)
        lacking = swept.ask.prompt_tokens if held is None else swept.ask.prompt_tokens - held.item(split + decode)
        moved = lacking * self.group.kv_bytes_per_token
        cost = firsts.item(prefill) + seconds.item(decode) + base_s
        return Pair(self.group, prefill, decode, cost, base_s + moved * s_per_byte, moved, self.group.rest)

    def legs(self, swept: Swept, policy: Policy) -> Sequence[WeighedLeg]:
        """The two legs as they would have been weighed one by one, for explanations."""
        rows = np.zeros((ROWS, swept.cells.shape[1]))
        for row, prefill, decode in zip(range(6), _PREFILL_ROWS, _DECODE_ROWS, strict=True):
            rows[prefill, : self.split] = swept.cells[row, : self.split]
            rows[decode, self.split :] = swept.cells[row, self.split :]
        extra = np.zeros(len(swept.costs))
        parts = (slice(0, self.split), slice(self.split, None))
        for place, part in zip(swept.preferred, parts, strict=True):
            if place is not None:
                extra[part] = swept.preference_s
                extra[place] = 0.0
        legs = []
        for kind, targets, part in zip(_KINDS, (self.prefills, self.decodes), parts, strict=True):
            held = None if swept.held is None else swept.held[part]
            candidates = Candidates(kind, swept.ask, swept.now, targets, held, rows[:, part], False)
            legs.append(WeighedLeg(candidates, policy.costs(candidates) + extra[part], policy))
        return legs

    def _places(self, pair: tuple[Target | None, Target]) -> tuple[int | None, int | None]:
        if not self._by_target:
            everybody = (*self.prefills, *self.decodes)
            self._by_target.update({target: place for place, target in enumerate(everybody)})
        prefill, decode = (None if target is None else self._by_target.get(target) for target in pair)
        return (
            prefill if prefill is not None and prefill < self.split else None,
            decode if decode is not None and decode >= self.split else None,
        )


def _cells(rows: Sequence[int], targets: Sequence[Target], board: Board) -> Positions:
    columns = np.array([target.column for target in targets], dtype=np.intp)
    return np.array(rows, dtype=np.intp)[:, None] * board.columns + columns
