"""Determines a request's phase, and whether its resources are free, from the load records of its two workers. Pure."""

from collections.abc import Mapping

from kvmesh.core import LoadRecord

PHASES = (
    ("prefill", "bootstrapping_requests", "bootstrapping"),
    ("prefill", "waiting_requests", "queued, prefill"),
    ("decode", "preallocating_requests", "preallocating"),
    ("decode", "retracted_requests", "retracted"),
    ("decode", "waiting_requests", "queued, decode"),
    ("decode", "pulling_requests", "transfer"),
    ("decode", "receiving_requests", "transfer"),
    ("prefill", "sending_requests", "sending"),
    ("prefill", "running_requests", "prefill"),
    ("decode", "running_requests", "decode"),
    ("prefill", "kv_blocks_leased", "handed over"),
)
"""Side, field of its load record, and the phase of a request that the field counts. The first field that has grown determines the phase.

A request of a rendezvous is on both sides at once. Its phase is the one that it waits for.
"""
QUEUES = tuple(dict.fromkeys(name for _, name, _ in PHASES if name.endswith("_requests")))
NO_QUEUE = LoadRecord()
"""The load of an idle worker."""


def phase_of(at: Mapping[str, LoadRecord], before: Mapping[str, LoadRecord]) -> str:
    """Returns the phase of the request that arrived after `before`."""
    for side, name, phase in PHASES:
        if getattr(at[side], name) > getattr(before[side], name):
            return phase
    return "none seen"


def is_freed(load: LoadRecord, before: LoadRecord) -> bool:
    """Returns whether the request that arrived after `before` has no queue or batch entry and no block.

    While other requests run, its blocks cannot be distinguished from theirs; then only its entries count.
    """
    if any(getattr(load, name) > getattr(before, name) for name in QUEUES):
        return False
    return bool(before.kv_blocks_used) or not load.kv_blocks_used
