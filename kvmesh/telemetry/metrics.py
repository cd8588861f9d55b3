"""Prometheus instruments with the mesh's names."""

import re
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvmesh.telemetry.tally import Spreads, Tally

_WORD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*\Z")
# Endings that break the rules for names.
_WRONG_ENDINGS = ("_total", "_s", "_ms", "_us", "_sec", "_secs", "_milliseconds", "_kb", "_mb", "_percent")
# From 0.2 ms, for the mesh's own hops, to two minutes, for a long prompt on a CPU.
DURATION_BUCKETS_S = (
    0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip


class Instruments:
    """Makes the instruments `kvmesh_<service>_<what>_<unit>[_total]` of one service.

    `name` is `<what>_<unit>` with a base unit (seconds, bytes, tokens, requests...). The values of `labels` must be from closed sets, never
    ids. ValueError when a name is used twice.
    """

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self.registry = registry
        self._prefix = f"kvmesh_{_checked(service)}_"

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:  # noqa: A002
        """`_total` is added to the name."""
        return Counter(self._prefix + _checked(name), help, labels, registry=self.registry)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:  # noqa: A002
        return Gauge(self._prefix + _checked(name), help, labels, registry=self.registry)

    def gauge_function(self, name: str, help: str, function: Callable[[], float]) -> Gauge:  # noqa: A002
        """Each scrape calls `function`, which must be quick and must not raise."""
        gauge = self.gauge(name, help=help)
        gauge.set_function(function)
        return gauge

    def histogram(
        self,
        name: str,
        help: str,  # noqa: A002
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = DURATION_BUCKETS_S,
    ) -> Histogram:
        """Creates a histogram. The default buckets are for durations in seconds."""
        return Histogram(self._prefix + _checked(name), help, labels, registry=self.registry, buckets=buckets)

    def tally(self, name: str, help: str, labels: Sequence[str] = ()) -> Tally:  # noqa: A002
        """Returns a counter without a lock, for the event loop's thread only."""
        return Tally(registry=self.registry, name=self._prefix + _checked(name), help=help, labels=labels)

    def spreads(
        self,
        name: str,
        help: str,  # noqa: A002
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = DURATION_BUCKETS_S,
    ) -> Spreads:
        return Spreads(
            registry=self.registry, name=self._prefix + _checked(name), help=help, labels=labels, buckets=buckets
        )


class ClosedSet:
    """Bounds the values of a label: values after the first `values_max` become `other`."""

    def __init__(self, values_max: int, *, is_word: bool = True) -> None:
        self._values_max = values_max
        self._is_word = is_word
        self._values: set[str] = set()

    def label(self, value: str) -> str:
        if value in self._values:
            return value
        if len(self._values) >= self._values_max or (self._is_word and not _WORD.match(value)):
            return "other"
        self._values.add(value)
        return value


def _checked(name: str) -> str:
    if not _WORD.match(name) or name.endswith(_WRONG_ENDINGS):
        raise ValueError(f"metric name {name!r} is not <what>_<unit> in lower case with a base unit")
    return name
