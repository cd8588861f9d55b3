"""By the number of requests."""

from typing import ClassVar

from services.router.placement.policies.base import Candidates, Columns, Policy


class LeastLoadedPolicy(Policy):
    """Whoever has the fewest requests."""

    name: ClassVar[str] = "least_loaded"
    cost_unit: ClassVar[str] = "requests"
    preference: float = 1.0

    def weigh(self, candidates: Candidates) -> Columns:
        """One term: requests running, waiting or on their way."""
        return {"requests": candidates.each("requests_active")}
