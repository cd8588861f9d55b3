"""Only where the ask says, for tests."""

from typing import ClassVar

import numpy as np

from kvmesh.core import Ask
from kvmesh.errors import InvalidRequestError
from services.router.placement.policies.base import Candidates, Columns, Policy


class PinnedPolicy(Policy):
    """Refuses asks that do not say where to decode; other policies follow pins too, and choose where there are none."""

    name: ClassVar[str] = "pinned"

    def check(self, ask: Ask) -> None:
        """Without a pin there is nothing to follow."""
        if not ask.pinned_decode_worker_id:
            raise InvalidRequestError(
                "this router places only where it is told", field="pinned_decode_worker_id", reason="not_pinned"
            )

    def weigh(self, candidates: Candidates) -> Columns:
        """Pins have left no other candidates, save ranks of one worker: those take turns."""
        return {"turn": candidates.each("placed_last") if candidates.targets else np.zeros(0)}
