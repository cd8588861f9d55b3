"""In which phase a request is, and when nothing of it is left, by the load records of its two workers. Pure."""

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
"""Side, field of its load record, and the phase of a request that the field counts. The first that counts more than before holds.

A request of a rendezvous is on both sides at once: it counts by what it waits for.
"""
QUEUES = tuple(dict.fromkeys(name for _, name, _ in PHASES if name.endswith("_requests")))
NO_QUEUE = LoadRecord()
"""The load of an idle worker."""


def phase_of(at: Mapping[str, LoadRecord], before: Mapping[str, LoadRecord]) -> str:
    """The phase of the request that came after `before`."""
    for side, name, phase in PHASES:
        if getattr(at[side], name) > getattr(before[side], name):
            return phase
    return "none seen"


def is_freed(load: LoadRecord, before: LoadRecord) -> bool:
    """Whether nothing is left of the request that came after `before`: no place in a queue or batch, and no block.

    While others run, their blocks cannot be distinguished; then only its batch place counts.
    """
    if any(getattr(load, name) > getattr(before, name) for name in QUEUES):
        return False
    return bool(before.kv_blocks_used) or not load.kv_blocks_used
