"""When a watcher of a worker's load must hear of it. Pure: time and load are arguments.

A message costs the worker and each router some hundred microseconds, ten times a second for each worker, while all that is new is
that engines made their steps and answers grew by a block.
"""

from dataclasses import fields
from operator import attrgetter

from kvmesh.core import LoadRecord

PROGRESS_INTERVAL_S = 0.5
"""Time between two records that report only steps made and blocks filled."""
BLOCKS_SHARE = 64
"""Of the pool, the part that blocks in use may move before that is told at once."""
_PROGRESS = (
    "step", "step_s", "kv_blocks_used", "kv_blocks_free", "prompt_tokens_total", "output_tokens_total",
    "cached_tokens_total", "transferred_tokens_total",
)  # fmt: skip
_OTHERS = ("worker_id", "epoch", "sequence", "taken_at_s", "is_draining")
_progress = attrgetter(*_PROGRESS)
_requests = attrgetter(*(field.name for field in fields(LoadRecord) if field.name not in (*_PROGRESS, *_OTHERS)))


class LoadNews:
    """One watcher's. Requests and memory are told whenever it looks, progress and silence after their intervals."""

    def __init__(self, *, interval_s: float, progress_interval_s: float = PROGRESS_INTERVAL_S) -> None:
        self._progress_interval_s = progress_interval_s
        self._interval_s = interval_s
        self._told: LoadRecord | None = None
        self._told_draining = False
        self._told_at_s = 0.0

    def is_due(self, load: LoadRecord, now_s: float, *, is_draining: bool) -> bool:
        """Whether this load is to be told now; it is taken as told then."""
        told = self._told
        if told is not None and is_draining == self._told_draining and not self._is_new(told, load, now_s):
            return False
        self._told, self._told_draining, self._told_at_s = load, is_draining, now_s
        return True

    def _is_new(self, told: LoadRecord, load: LoadRecord, now_s: float) -> bool:
        silent_s = now_s - self._told_at_s
        if silent_s >= self._interval_s or _requests(told) != _requests(load):
            return True
        if bool(told.kv_blocks_used) != bool(load.kv_blocks_used):
            return True
        if silent_s >= self._progress_interval_s and _progress(told) != _progress(load):
            return True
        return abs(load.kv_blocks_used - told.kv_blocks_used) * BLOCKS_SHARE > load.kv_blocks_total
