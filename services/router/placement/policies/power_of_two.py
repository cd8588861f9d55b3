"""The less loaded of two drawn by chance: nearly as even as asking all, without everybody running to the same one."""

from typing import ClassVar

import numpy as np

from services.router.placement.policies.base import Candidates, Columns, Policy


class PowerOfTwoPolicy(Policy):
    """Two are drawn for every leg; the others cost infinitely much."""

    name: ClassVar[str] = "power_of_two"
    cost_unit: ClassVar[str] = "requests"
    preference: float = 1.0

    def weigh(self, candidates: Candidates) -> Columns:
        """One term: requests of the two drawn. A full one is not drawn as long as there are others."""
        targets = candidates.targets
        places = [i for i, target in enumerate(targets) if target.takes_requests and target.takes_prompts] or list(
            range(len(targets))
        )
        requests = np.full(len(targets), np.inf)
        for i in self.context.generator.sample(places, min(2, len(places))):
            requests[i] = targets[i].requests_active
        return {"requests": requests}
