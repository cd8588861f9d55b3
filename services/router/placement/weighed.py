"""One leg of a request with all candidates weighed. Pure."""

from dataclasses import dataclass

from services.router.placement.policies import Candidates, Columns, LegKind, Policy
from services.router.workers.board import Floats


@dataclass(slots=True, eq=False)
class WeighedLeg:
    """One leg: its candidates, and their costs with preferences, infinite for those that are full."""

    candidates: Candidates
    costs: Floats
    policy: Policy

    @property
    def kind(self) -> LegKind:
        """What the candidates were weighed for."""
        return self.candidates.kind

    @property
    def columns(self) -> Columns:
        """The terms by name, without preferences."""
        return self.policy.terms(self.candidates)
