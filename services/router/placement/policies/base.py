"""The interface of policies, and what they see of the candidates.

A policy weighs one leg of a request on all candidates at once and gives its terms as columns, one value per candidate. The
cost of a candidate is the sum of its terms, the cost of a pair the sum of both legs plus the transfer for policies that count
it; the lowest wins (`place.py`). An infinite cost takes a candidate out. One's own: a class like those beside this file, in a
package that lists it under the entry-point group `kvmesh.router_policies`; its name there is the setting's value.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import ClassVar

import numpy as np

from kvmesh.core import Ask
from services.router.workers.board import Floats
from services.router.workers.cost_settings import CostSettings
from services.router.workers.target import Target

Columns = Mapping[str, Floats]


class LegKind(StrEnum):
    """What a candidate is weighed for. ALONE: the decode worker computes the prompt too."""

    PREFILL = "prefill"
    DECODE = "decode"
    ALONE = "alone"


@dataclass(slots=True, eq=False)
class Candidates:
    """Those who could take one leg, and what is known of them at this moment. Read only.

    `held[i]` is what `targets[i]` has cached of the prompt, in tokens, those of slower tiers for less; None: nobody has any.
    `rows[row, i]` is what the board says of it; other sums over its requests are its attributes, but those change later.
    """

    kind: LegKind
    ask: Ask
    now: float
    targets: Sequence[Target]
    held: Floats | None
    rows: Floats
    has_pairs: bool
    """Whether the row PER_PAIR is worth reading: else it is zero."""
    columns: Columns | None = None
    """What `Policy.weigh` gave, if it was asked."""

    @property
    def uncached_tokens(self) -> Floats:
        """Prompt tokens that each would have to compute or to receive."""
        held = np.zeros(len(self.targets)) if self.held is None else self.held
        return self.ask.prompt_tokens - held

    def each(self, attribute: str) -> Floats:
        """A number of every target by name, such as `requests_active`."""
        return np.array([getattr(target, attribute) for target in self.targets], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """What a policy may use. The generator is the only source of chance."""

    cost: CostSettings
    generator: Random


class Policy(ABC):
    """One way to weigh."""

    name: ClassVar[str]
    """Found by this word; also the reason of a placement, except for `kv`, which says what decided."""
    cost_unit: ClassVar[str] = ""
    """Unit of the columns for those who read explanations; `s`: seconds to first token are told in placements."""
    counts_transfer: ClassVar[bool] = False
    """Whether the time to move KV between the two legs is added, in seconds."""
    preference: float = 0.0
    """Cost on top for a candidate that lacks something the ask prefers, in the policy's unit."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    def check(self, ask: Ask) -> None:
        """Raises InvalidRequestError for an ask that it cannot place."""
        return

    @abstractmethod
    def weigh(self, candidates: Candidates) -> Columns:
        """The terms: at least one column, each as long as there are candidates."""

    def costs(self, candidates: Candidates) -> Floats:
        """The sum of the terms. Calls `weigh` once and keeps what it gave for explanations."""
        columns = candidates.columns = self.weigh(candidates)
        rows = iter(columns.values())
        costs = next(rows)
        for column in rows:
            costs = costs + column
        return costs

    def terms(self, candidates: Candidates) -> Columns:
        """The terms as they were when the costs were asked for, any time later."""
        if candidates.columns is None:
            candidates.columns = self.weigh(candidates)
        return candidates.columns
