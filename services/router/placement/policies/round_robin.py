"""Taking turns."""

from typing import ClassVar

from services.router.placement.policies.base import Candidates, Columns, Policy


class RoundRobinPolicy(Policy):
    """Whoever got a request longest ago."""

    name: ClassVar[str] = "round_robin"
    cost_unit: ClassVar[str] = "turn"

    def weigh(self, candidates: Candidates) -> Columns:
        """One term: the number of the placement that it got last."""
        return {"turn": candidates.each("placed_last")}
