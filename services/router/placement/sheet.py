"""The costs of the `kv` policy for all candidates of both legs in one sweep over one array: the ordinary ask of an ordinary pool.

Both legs have the same form, so half as many array operations do: the larger of a time that passes and one that does not, plus a
rate times the tokens lacking, plus a batch's part. For prefill the first is the queue with the base, the rate that of computing.
For decode the first is the wait for a slot, the rate that of the transfer from the farthest; what a nearer one saves is laid over
it where some pairs are nearer. Only pools in which every pair can exchange KV have a sheet. A property test holds this equal to
`KvPolicy` and `pairing.best_pair`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmesh.core import Ask
from services.router.placement.links import Distance
from services.router.placement.pairing import INFINITE, Lines, Selector
from services.router.placement.policies import Candidates, LegKind
from services.router.placement.policies.kv import KvPolicy
from services.router.placement.topology import Group
from services.router.placement.weighed import WeighedLeg
from services.router.workers.board import (
    BASE,
    FLOOR,
    GROWTH,
    NEVER,
    NOTHING,
    PER_TOKEN,
    RATE,
    ROWS,
    SHARE,
    UNTIL,
    WAIT,
    Board,
    Floats,
    Positions,
)
from services.router.workers.target import Target

_PREFILL_ROWS = (UNTIL, FLOOR, PER_TOKEN, NOTHING, NOTHING, BASE)
_KINDS = (LegKind.PREFILL, LegKind.DECODE)
_DECODE_ROWS = (NEVER, WAIT, RATE, GROWTH, SHARE, NOTHING)
Places = tuple[int | None, int | None]


@dataclass(slots=True, eq=False)
class Swept:
    """The pair that a sweep found, as `pairing.Pair` has it, and what was read for it."""

    sheet: "Sheet"
    policy: KvPolicy
    ask: Ask
    now: float
    held: Floats | None
    cells: Floats
    preferred: Places
    """Places of the session's targets."""
    prefill: int
    decode: int
    cost: float
    transfer_s: float
    transfer_bytes: float
    distance: Distance

    @property
    def group(self) -> Group:
        """All candidates."""
        return self.sheet.group

    def legs(self) -> Sequence[WeighedLeg]:
        """The two legs as they would have been weighed one by one, for explanations."""
        sheet, split = self.sheet, self.sheet.split
        rows = np.zeros((ROWS, self.cells.shape[1]))
        for row, prefill, decode in zip(range(6), _PREFILL_ROWS, _DECODE_ROWS, strict=True):
            rows[prefill, :split] = self.cells[row, :split]
            rows[decode, split:] = self.cells[row, split:]
        extra = np.zeros(self.cells.shape[1])
        parts = (slice(0, split), slice(split, None))
        for place, part in zip(self.preferred, parts, strict=True):
            if place is not None:
                extra[part] = self.policy.preference
                extra[place] = 0.0
        legs = []
        for kind, targets, part in zip(_KINDS, (sheet.prefills, sheet.decodes), parts, strict=True):
            held = None if self.held is None else self.held[part]
            candidates = Candidates(kind, self.ask, self.now, targets, held, rows[:, part], False)
            legs.append(WeighedLeg(candidates, self.policy.costs(candidates) + extra[part], self.policy))
        return legs


class Sheet:
    """One pool's. Columns of the board are looked up once; the pool is made anew when they change.

    Arrays that are of no use after the decision are the same for all decisions.
    """

    __slots__ = (
        "_board",
        "_by_target",
        "_costs",
        "_factors",
        "_first_terms",
        "_firsts",
        "_lookup",
        "_now",
        "_seconds",
        "_terms",
        "decodes",
        "group",
        "prefills",
        "split",
    )

    def __init__(self, group: Group, prefills: Sequence[Target], decodes: Sequence[Target], board: Board) -> None:
        self.group = group
        self.prefills, self.decodes = prefills, decodes
        self.split = len(prefills)
        self._board = board
        self._by_target: dict[Target, int] = {}
        self._lookup: Positions = np.concatenate(
            (_cells(_PREFILL_ROWS, prefills, board), _cells(_DECODE_ROWS, decodes, board)), axis=1
        )
        self._costs: Floats = np.zeros(self._lookup.shape[1])
        self._firsts, self._seconds = self._costs[: self.split], self._costs[self.split :]
        self._terms: Floats = np.zeros(self._lookup.shape[1])
        self._first_terms = self._terms[: self.split]
        self._factors: Floats = np.zeros(3)
        self._now: Floats = np.zeros(())

    def best(
        self,
        ask: Ask,
        now: float,
        held: Floats | None,
        lines: Lines,
        policy: KvPolicy,
        selector: Selector,
        session: tuple[Target | None, Target] | None,
    ) -> Swept | None:
        """The cheapest pair, as `pairing.best_pair` finds it; None when all are full.

        `lines` as `Links` has them. Everybody costs more than the session's pair, on a side on which its target is.
        """
        group, tokens = self.group, ask.prompt_tokens
        kv_bytes, distance = group.kv_bytes_per_token, group.rest
        base_s, s_per_byte = lines[distance]
        cells = self._sweep(ask, now, held, kv_bytes * s_per_byte, policy.delayed(ask))
        preferred: Places = (None, None) if session is None else self._prefer(session, policy.preference)
        firsts = self._firsts
        prefill = int(firsts.argmin())
        least_first = firsts.item(prefill)
        if least_first == INFINITE:
            return None
        common_s = least_first + base_s
        wholes = self._seconds if not group.near else self._with_near(common_s, tokens, held, lines)
        decode = int(wholes.argmin())
        least = wholes.item(decode)
        if least == INFINITE:
            return None
        margin = selector.tie_ratio * (least + common_s)
        decode = selector.near(wholes, decode, least, margin, held, self.decodes, self.split)
        margin = selector.tie_ratio * (wholes.item(decode) + common_s)
        moved = (tokens if held is None else tokens - held.item(self.split + decode)) * kv_bytes
        far_s = moved * s_per_byte
        if group.near:
            firsts = self._with_transfers(decode, base_s + far_s, moved, lines)
            prefill = int(firsts.argmin())
            least_first = firsts.item(prefill)
        prefill = selector.near(firsts, prefill, least_first, margin, held, self.prefills)
        transfer_s = base_s + far_s
        if group.near:
            distance = group.distance(prefill, decode)
            base_s, s_per_byte = lines[distance]
            transfer_s = base_s + moved * s_per_byte
        cost = self._costs.item(prefill) + (self._costs.item(self.split + decode) - far_s) + transfer_s
        return Swept(self, policy, ask, now, held, cells, preferred, prefill, decode, cost, transfer_s, moved, distance)

    def _sweep(
        self, ask: Ask, now: float, held: Floats | None, transfer_s_per_token: float, delayed: tuple[float, float]
    ) -> Floats:
        """Writes the costs, the prefill candidates' first, those of decode without the transfer's base. Gives what was read."""
        board, costs, terms, factors = self._board, self._costs, self._terms, self._factors
        board.cells[RATE * board.columns] = transfer_s_per_token
        cells: Floats = board.flat.take(self._lookup)
        rates = cells[2]
        # Numbers are handed over in arrays: numpy takes as long to look at a plain one as for the operation.
        self._now[()] = now
        np.subtract(cells[0], self._now, costs)
        np.maximum(costs, cells[1], costs)
        factors[0] = ask.prompt_tokens
        factors[1], factors[2] = delayed
        factors.dot(cells[2:5], terms)
        np.add(costs, terms, costs)
        if held is not None:
            np.multiply(rates, held, terms)
            np.subtract(costs, terms, costs)
        return cells

    def _with_near(self, common_s: float, tokens: int, held: Floats | None, lines: Lines) -> Floats:
        """The lowest cost of each decode candidate, less what is common, now that prefill candidates may be nearer than the rest."""
        group, seconds = self.group, self._seconds
        kv_bytes, s_per_byte = group.kv_bytes_per_token, lines[group.rest][1]
        lacking: Floats | int = tokens if held is None else tokens - held[self.split :]
        wholes = seconds
        for distance, near in group.near:
            near_base_s, near_s_per_byte = lines[distance]
            saved = lacking * ((near_s_per_byte - s_per_byte) * kv_bytes) + (near_base_s - common_s)
            costs = near.lowest(self._firsts)
            costs += saved
            costs += seconds
            wholes = np.minimum(wholes, costs, costs)
        return wholes

    def _with_transfers(self, decode: int, far_s: float, moved: float, lines: Lines) -> Floats:
        """The costs of the prefill candidates with their transfers to one decode candidate."""
        firsts, costs = self._firsts, self._first_terms
        np.add(firsts, far_s, costs)
        for distance, near in reversed(self.group.near):
            segment = near.prefills_of(decode)
            if segment is not None:
                base_s, s_per_byte = lines[distance]
                np.add(firsts[segment], base_s + moved * s_per_byte, costs[segment])
        return costs

    def _prefer(self, session: tuple[Target | None, Target], preference_s: float) -> Places:
        preferred = self._places(session)
        for place, part in zip(preferred, (self._firsts, self._seconds), strict=True):
            if place is not None:
                part += preference_s
                self._costs[place] -= preference_s
        return preferred

    def _places(self, pair: tuple[Target | None, Target]) -> Places:
        if not self._by_target:
            everybody = (*self.prefills, *self.decodes)
            self._by_target.update({target: place for place, target in enumerate(everybody)})
        prefill, decode = (None if target is None else self._by_target.get(target) for target in pair)
        return (
            prefill if prefill is not None and prefill < self.split else None,
            decode if decode is not None and decode >= self.split else None,
        )


def _cells(rows: Sequence[int], targets: Sequence[Target], board: Board) -> Positions:
    """Where the numbers stand in the board's array. The rate of the transfer has one place for all."""
    columns = np.array([target.column for target in targets], dtype=np.intp)
    places = np.array(rows, dtype=np.intp)[:, None] * board.columns + columns
    places[np.array(rows) == RATE] = RATE * board.columns
    return places
