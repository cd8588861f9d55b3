"""Finds an engine that does not answer cancels. Pure: times are arguments.

An engine ends a cancelled leg within one step. An engine that does not hangs or has lost the leg: the leg's batch slot and blocks stay in
use until a restart.
"""


class CancelWatch:
    """Cancelled legs whose finish has not come.

    Only time during which `sweep` runs counts, since a process that was suspended gave its engine no time either: a pause between two
    sweeps counts as at most `sweep_s_max`.
    """

    def __init__(self, *, limit_s: float, sweep_s_max: float) -> None:
        self._limit_s = limit_s
        self._sweep_s_max = sweep_s_max
        self._swept_at_s: float | None = None
        self._counted_s = 0.0
        self._since_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._since_s)

    def add(self, key: int) -> None:
        """Records that the engine was asked to stop the leg. Later calls for it change nothing."""
        self._since_s.setdefault(key, self._counted_s)

    def remove(self, key: int) -> None:
        """The leg has ended. Unknown keys are ignored."""
        self._since_s.pop(key, None)

    def clear(self) -> None:
        """The engine has died."""
        self._since_s.clear()

    def sweep(self, now_s: float) -> int:
        """Returns the number of legs that have waited for longer than the limit."""
        if self._swept_at_s is not None:
            self._counted_s += min(now_s - self._swept_at_s, self._sweep_s_max)
        self._swept_at_s = now_s
        return sum(self._counted_s - since_s > self._limit_s for since_s in self._since_s.values())
