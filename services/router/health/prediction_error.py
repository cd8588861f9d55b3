"""How far the router's predictions are from what is observed. Pure."""

from collections.abc import Iterable

OTHER = "other"
RATIO_BUCKETS = (-0.9, -0.75, -0.5, -0.25, -0.1, 0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Buckets of (observed - expected) / expected: -0.5 means half the expected time, 1 means twice.

Prometheus keeps no sum for a histogram with buckets below zero; read quantiles.
"""
EXPECTED_MIN_S = 1e-4
"""The relative error of a shorter time is meaningless."""


def error_ratio(expected_s: float | None, observed_s: float | None) -> float | None:
    """Returns the relative error. None: there is nothing to compare."""
    if expected_s is None or observed_s is None or expected_s < EXPECTED_MIN_S:
        return None
    return (observed_s - expected_s) / expected_s


class WorkerLabels:
    """Worker ids as values of a metric's label.

    Ids are not a closed set, but a prediction error is meaningful per worker only. Two rules bound the number of labels: beyond
    `workers_max` at a time, workers share the label `other`; when a worker leaves, its label is removed.
    """

    def __init__(self, workers_max: int) -> None:
        self._workers_max = workers_max
        self._known: set[str] = set()

    def label_of(self, worker_id: str) -> str:
        if worker_id in self._known:
            return worker_id
        if len(self._known) >= self._workers_max:
            return OTHER
        self._known.add(worker_id)
        return worker_id

    def remove_absent(self, present: Iterable[str]) -> list[str]:
        absent = sorted(self._known.difference(present))
        self._known.difference_update(absent)
        return absent
