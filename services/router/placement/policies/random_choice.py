"""By chance."""

from typing import ClassVar

import numpy as np

from services.router.placement.policies.base import Candidates, Columns, Policy


class RandomPolicy(Policy):
    """Anybody, from a seeded generator."""

    name: ClassVar[str] = "random"
    cost_unit: ClassVar[str] = "chance"
    preference: float = 0.5

    def weigh(self, candidates: Candidates) -> Columns:
        """One term: a random number."""
        draw = self.context.generator.random
        return {"chance": np.array([draw() for _ in candidates.targets])}
