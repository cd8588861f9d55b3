"""Counters and histograms of plain numbers export the same text as Prometheus' own."""

import random
import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics

from kvmesh.telemetry import Instruments

BUCKETS = {"above": (0.0, 0.5, 1.0, 2.5), "below": (-0.9, -0.5, 0.0, 1.0)}


def instruments() -> Instruments:
    return Instruments(CollectorRegistry(), "router")


def lines(of: Instruments) -> list[list[str]]:
    """Returns the exported lines, without creation times."""
    return [
        sorted(re.sub(r"(_created.* ).*", r"\1", line) for line in generate(of.registry).decode().splitlines())
        for generate in (generate_latest, generate_open_metrics)
    ]


@pytest.mark.parametrize("bounds", BUCKETS)
def test_exported_lines_equal_those_of_prometheus(bounds: str) -> None:
    """The texts are equal with and without labels, for buckets below and above zero, and for values on a bound and beyond all bounds."""
    theirs, ours = instruments(), instruments()
    names = ("asks", "Asks.", ("kind",)), ("answers", "Answers.")
    counters, tallies = [theirs.counter(*name) for name in names], [ours.tally(*name) for name in names]
    arguments = ("wait_seconds", "Wait.", ("worker",)), ("turn_seconds", "Turn.")
    histograms = [theirs.histogram(*each, buckets=BUCKETS[bounds]) for each in arguments]
    spreads = [ours.spreads(*each, buckets=BUCKETS[bounds]) for each in arguments]
    assert lines(theirs) == lines(ours)
    generator = random.Random(7)
    for _ in range(200):
        value, word = generator.choice((*BUCKETS[bounds], generator.uniform(-2, 4))), generator.choice("abc")
        counters[0].labels(word).inc()
        counters[1].inc(3)
        tallies[0].of(word).value += 1
        tallies[1].of().value += 3
        histograms[0].labels(word).observe(value)
        histograms[1].observe(value)
        spreads[0].of(word).observe(value)
        spreads[1].of().observe(value)
    histograms[0].remove("a")
    spreads[0].forget("a")
    assert lines(theirs) == lines(ours)


def test_names_are_unique_and_labels_are_complete() -> None:
    """A duplicate name, or a wrong number of labels, is an error as with Prometheus' own metrics."""
    ours = instruments()
    tally, spreads = ours.tally("asks", "Asks.", ("kind",)), ours.spreads("wait_seconds", "Wait.", ("worker",))
    with pytest.raises(ValueError, match="Duplicated"):
        ours.counter("asks", "Again.")
    with pytest.raises(ValueError, match="Duplicated"):
        ours.histogram("wait_seconds", "Again.")
    with pytest.raises(ValueError, match="labels"):
        tally.of()
    with pytest.raises(ValueError, match="labels"):
        spreads.of("a", "b")
