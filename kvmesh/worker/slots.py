"""Links, their slots, and the keys of their legs in the engine. Plain state: no I/O, and time is an argument.

An engine key is `link number * 2^32 + slot`, so a step's keys become slots by masking and no per-request look-up is needed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from kvmesh.core import TokenLogprob
from kvmesh.engines.base import EngineFinish, StepOutput
from kvmesh.errors import MeshError
from kvmesh.kv.seals import SealScope

SLOT_BITS = 32
SLOT_MASK = (1 << SLOT_BITS) - 1
SLOTS_MAX = 1 << 31
DEADLINES_SLACK = 64


def key_of(link: int, slot: int) -> int:
    """Returns the engine key of a slot."""
    return link << SLOT_BITS | slot


@dataclass(slots=True, kw_only=True)
class LegRecord:
    """One leg in the engine. `failure` replaces the engine's finish (deadline, drain). `scope`: whom its handle is sealed for."""

    leg_id: str
    deadline_s: float
    is_cancelled: bool = False
    failure: MeshError | None = None
    scope: SealScope | None = None


@dataclass(slots=True, kw_only=True)
class LinkStep:
    """One step's share of one link; `prompt_logprobs` by slot."""

    slots: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] | None = None
    finishes: list[EngineFinish] = field(default_factory=list)
    prompt_logprobs: dict[int, Sequence[TokenLogprob]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class LegTable:
    """All legs in the engine.

    Invariants: 1. a key is here exactly while the engine owes its finish; 2. leg ids are unique among live legs;
    3. `collect_overdue` gives each leg at most once; 4. memory is proportional to the live legs.
    """

    _legs: dict[int, LegRecord] = field(default_factory=dict)
    _leg_ids: dict[str, int] = field(default_factory=dict)
    _deadlines: list[tuple[float, int]] = field(default_factory=list)
    _legs_of_links: Counter[int] = field(default_factory=Counter)

    def add(self, key: int, record: LegRecord) -> None:
        self._legs[key] = record
        self._leg_ids[record.leg_id] = key
        self._legs_of_links[key >> SLOT_BITS] += 1
        heappush(self._deadlines, (record.deadline_s, key))

    def remove(self, key: int) -> LegRecord | None:
        record = self._legs.pop(key, None)
        if record is not None:
            self._leg_ids.pop(record.leg_id, None)
            link = key >> SLOT_BITS
            self._legs_of_links[link] -= 1
            if not self._legs_of_links[link]:
                del self._legs_of_links[link]
            self._forget_deadlines()
        return record

    def _forget_deadlines(self) -> None:
        # Most legs end long before their deadline, which would otherwise stay here until then.
        if len(self._deadlines) > 2 * len(self._legs) + DEADLINES_SLACK:
            self._deadlines = [(record.deadline_s, key) for key, record in self._legs.items()]
            heapify(self._deadlines)

    def links(self) -> tuple[int, ...]:
        """Links with live legs, including closed links whose cancelled legs have not finished."""
        return tuple(self._legs_of_links)

    def get(self, key: int) -> LegRecord | None:
        return self._legs.get(key)

    def has_leg_id(self, leg_id: str) -> bool:
        """Returns True while a leg of this id is live."""
        return leg_id in self._leg_ids

    def key_of_leg_id(self, leg_id: str) -> int | None:
        """Returns None if no leg of this id is live."""
        return self._leg_ids.get(leg_id)

    def count_of_link(self, link: int) -> int:
        """Returns how many live legs a link has."""
        return self._legs_of_links[link]

    def all_keys(self) -> list[int]:
        return list(self._legs)

    def keys_of_link(self, link: int) -> list[int]:
        """Keys of one link's live legs."""
        return [key for key in self._legs if key >> SLOT_BITS == link]

    def clear(self) -> None:
        """Removes all legs, when the engine has died."""
        self._legs.clear()
        self._leg_ids.clear()
        self._legs_of_links.clear()
        self._deadlines.clear()

    def collect_overdue(self, now_s: float) -> list[int]:
        """Returns keys whose deadline has passed, each once."""
        overdue: list[int] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, key = heappop(self._deadlines)
            record = self._legs.get(key)
            # The entry may be of an earlier leg on the same slot. An overdue leg is returned once, so it has failed.
            if record is not None and record.deadline_s == deadline_s and record.failure is None:
                overdue.append(key)
        return overdue

    def __len__(self) -> int:
        return len(self._legs)


def split_by_link(output: StepOutput, links: Sequence[int]) -> dict[int, LinkStep]:
    """Returns a step's share of each link. `links` are all links with legs in the step; with one, this is a mask over the keys."""
    if len(links) == 1:
        slots = [key & SLOT_MASK for key in output.keys]
        step = LinkStep(slots=slots, token_ids=output.token_ids, counts=output.counts, finishes=list(output.finishes))
        if output.prompt_logprobs:
            step.prompt_logprobs = {key & SLOT_MASK: entries for key, entries in output.prompt_logprobs.items()}
        return {links[0]: step} if slots or step.finishes or step.prompt_logprobs else {}
    shares: dict[int, LinkStep] = {}
    start = 0
    for position, key in enumerate(output.keys):
        share = shares.get(key >> SLOT_BITS)
        if share is None:
            share = shares[key >> SLOT_BITS] = LinkStep(counts=None if output.counts is None else [])
        count = 1 if output.counts is None else output.counts[position]
        share.slots.append(key & SLOT_MASK)
        share.token_ids += output.token_ids[start : start + count]
        if share.counts is not None:
            share.counts.append(count)
        start += count
    for finish in output.finishes:
        shares.setdefault(finish.key >> SLOT_BITS, LinkStep()).finishes.append(finish)
    for key, entries in output.prompt_logprobs.items():
        shares.setdefault(key >> SLOT_BITS, LinkStep()).prompt_logprobs[key & SLOT_MASK] = entries
    return shares
