"""Counters and histograms for events that occur thousands of times per second.

Prometheus's own take a lock for every addition. These have no lock, since only the event loop's thread uses them; it also answers
scrapes.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

T = TypeVar("T")


class Count:
    """One number. Callers add to `value`."""

    __slots__ = ("began_s", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.began_s = time.time()


class Spread:
    """Counts of observed values by bucket; the last one counts values above all bounds."""

    __slots__ = ("_bounds", "began_s", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.began_s = time.time()

    def observe(self, value: float) -> None:
        """A value equal to a bound counts for that bound's bucket."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class _Labelled(Collector, Generic[T]):
    """Values by their label values."""

    def __init__(self, *, registry: CollectorRegistry, name: str, help: str, labels: Sequence[str]) -> None:  # noqa: A002
        self._name, self._help, self._labels = name, help, tuple(labels)
        self._values: dict[tuple[str, ...], T] = {}
        if not labels:
            self.of()
        registry.register(self)

    def _make(self) -> T:
        raise NotImplementedError

    def of(self, *labels: str) -> T:
        """Returns the value for these label values. Callers keep it, to avoid the lookup."""
        known = self._values.get(labels)
        if known is None:
            if len(labels) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}")
            known = self._values[labels] = self._make()
        return known

    def forget(self, *labels: str) -> None:
        """Removes these label values."""
        self._values.pop(labels, None)


class Tally(_Labelled[Count]):
    """A counter with labels."""

    def _make(self) -> Count:
        return Count()

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for labels, count in self._values.items():
            family.add_metric(labels, count.value, created=count.began_s)
        yield family

    describe = collect
    """The registry uses it to detect duplicate names."""


class Spreads(_Labelled[Spread]):
    """A histogram with labels. Like Prometheus's own, it has no sum if a bound is negative."""

    def __init__(
        self,
        *,
        registry: CollectorRegistry,
        name: str,
        help: str,  # noqa: A002
        labels: Sequence[str],
        buckets: Sequence[float],
    ) -> None:
        self._bounds = tuple(buckets)
        self._bound_texts = [*map(floatToGoString, buckets), "+Inf"]
        super().__init__(registry=registry, name=name, help=help, labels=labels)

    def _make(self) -> Spread:
        return Spread(self._bounds)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, spread in self._values.items():
            labels = dict(zip(self._labels, values, strict=True))
            # A bucket of Prometheus counts all values up to its bound.
            below = list(accumulate(spread.counts))
            for bound, count in zip(self._bound_texts, below, strict=True):
                family.add_sample(f"{self._name}_bucket", {**labels, "le": bound}, count)
            family.add_sample(f"{self._name}_count", labels, below[-1])
            if self._bounds[0] >= 0:
                family.add_sample(f"{self._name}_sum", labels, spread.total)
            family.add_sample(f"{self._name}_created", labels, spread.began_s)
        yield family

    describe = collect
