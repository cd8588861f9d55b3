"""How far what the router expected is from what came. Pure."""

from collections.abc import Iterable

OTHER = "other"
RATIO_BUCKETS = (-0.9, -0.75, -0.5, -0.25, -0.1, 0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
"""(observed - expected) / expected: -0.5 took half the time expected, 1 took twice. Prometheus keeps no sum beside buckets below
zero; quantiles are what one reads here."""
EXPECTED_MIN_S = 1e-4
"""Below it a relative error says nothing."""


def error_ratio(expected_s: float | None, observed_s: float | None) -> float | None:
    """The relative error; None: there is nothing to compare."""
    if expected_s is None or observed_s is None or expected_s < EXPECTED_MIN_S:
        return None
    return (observed_s - expected_s) / expected_s


class WorkerLabels:
    """Worker ids as values of a metric's label: at most so many at a time, the rest is `other`.

    Ids are not a closed set, so they do not belong into labels; the error of a prediction says something only about one
    worker, so here they do. What bounds them: a number, and that a worker that leaves takes its own along.
    """

    def __init__(self, workers_max: int) -> None:
        self._workers_max = workers_max
        self._known: set[str] = set()

    def label(self, worker_id: str) -> str:
        """The label's value."""
        if worker_id in self._known:
            return worker_id
        if len(self._known) >= self._workers_max:
            return OTHER
        self._known.add(worker_id)
        return worker_id

    def left(self, present: Iterable[str]) -> list[str]:
        """Forgets and gives the values of workers that are no longer there."""
        gone = sorted(self._known.difference(present))
        self._known.difference_update(gone)
        return gone
