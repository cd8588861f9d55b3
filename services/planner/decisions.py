"""The newest decisions of each model. Pure."""

from collections import deque
from collections.abc import Sequence

from kvmesh.core.planning import Decision, DecisionAction

DECISIONS_MAX = 32


class DecisionLog:
    """Keeps decisions that change something, or whose reason differs from the one before, and the newest one."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[Decision]] = {}

    def add(self, decision: Decision) -> bool:
        """Returns whether it differs from the model's decision before."""
        kept = self._kept.setdefault(decision.model, deque(maxlen=DECISIONS_MAX))
        is_new = not kept or not _is_repeated(kept[0], decision)
        if not is_new:
            kept.popleft()
        kept.appendleft(decision)
        return is_new

    def newest_first(self) -> Sequence[Decision]:
        """Returns all models, sorted by name."""
        return [decision for model in sorted(self._kept) for decision in self._kept[model]]

    def newest(self, model: str) -> Decision | None:
        return self._kept[model][0] if self._kept.get(model) else None


def _is_repeated(before: Decision, decision: Decision) -> bool:
    same = (before.action, before.reason, before.outcome) == (decision.action, decision.reason, decision.outcome)
    is_idle = decision.action in (DecisionAction.KEEP, DecisionAction.HOLD)
    return same and (is_idle or before.shape == decision.shape)
