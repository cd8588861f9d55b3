"""The interface of placement policies.

A policy scores one leg of a request on all candidates at once. It returns the terms of the cost as arrays, one value per candidate. The
cost of a candidate is the sum of its terms; the cost of a pair is the sum of both legs, plus the transfer for policies that count it. The
pair with the lowest cost wins. An infinite cost excludes a candidate; the router itself excludes full candidates.

To add a policy, write a class like those in this folder, in a package that lists it under the entry-point group
`kvmesh.router_policies`. Its name there is the value of the setting.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import ClassVar

import numpy as np

from kvmesh.core import Ask
from services.router.workers.cost_settings import CostSettings
from services.router.workers.target_arrays import Floats, Positions, TargetArrays
from services.router.workers.worker import Target

Terms = Mapping[str, Floats]


class LegKind(StrEnum):
    """What a candidate is scored for. ALONE: the decode worker computes the prompt too."""

    PREFILL = "prefill"
    DECODE = "decode"
    ALONE = "alone"


@dataclass(slots=True, eq=False, kw_only=True)
class Candidates:
    """The targets that could take one leg, and their state at this moment. Read only."""

    kind: LegKind
    ask: Ask
    now: float
    targets: Sequence[Target]
    cached_tokens: Floats
    """Tokens of the prompt that each target has cached; those of slower tiers count for a part."""
    arrays: TargetArrays
    """The numbers of all targets at this moment. They change with the next placement."""
    columns: Positions
    """The candidates' columns in `arrays`."""

    def values_of(self, attribute: str) -> Floats:
        """Returns an attribute of each target, such as `requests_active`."""
        return np.array([getattr(target, attribute) for target in self.targets], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """What a policy may use. The generator is its only source of randomness."""

    cost: CostSettings
    generator: Random


class Policy(ABC):
    """One way to score candidates."""

    name: ClassVar[str]
    """The value of the setting; also the reason of a placement, except for `kv`, which gives more precise ones."""
    cost_unit: ClassVar[str] = ""
    """Unit of the terms, for explanations. With `s` placements carry the expected seconds to the first token."""
    counts_transfer: ClassVar[bool] = False
    """Whether the time to move KV between the two legs is added, in seconds."""
    preference: float = 0.0
    """Cost on top for a candidate that lacks something the ask prefers, in `cost_unit`."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    def check(self, ask: Ask) -> None:
        """Raises InvalidRequestError for an ask that the policy cannot place."""
        return

    @abstractmethod
    def terms(self, candidates: Candidates) -> Terms:
        """At least one term, each with one value per candidate."""
