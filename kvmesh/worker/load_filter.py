"""Decides which load records a watcher gets. Pure: time and load are arguments.

A record costs the worker and each router some hundred microseconds, ten times a second for each worker. Records that report only steps
and a few more blocks are sent less often.
"""

from dataclasses import fields
from operator import attrgetter

from kvmesh.core import LoadRecord

PROGRESS_INTERVAL_S = 0.5
"""Time between two records that report only steps made and blocks filled."""
BLOCKS_SHARE = 64
"""A change of the blocks in use by more than this fraction (1/n) of the pool is reported immediately."""
_PROGRESS = (
    "step", "step_s", "kv_blocks_used", "kv_blocks_free", "prompt_tokens_total", "output_tokens_total",
    "cached_tokens_total", "transferred_tokens_total", "failed_handoffs_total", "recomputed_tokens_total",
    "pulling_requests", "kv_blocks_cached", "kv_blocks_held", "kv_blocks_unaccounted",
)  # fmt: skip
_OTHERS = ("worker_id", "epoch", "sequence", "taken_at_s", "is_draining")
_progress = attrgetter(*_PROGRESS)
_requests = attrgetter(*(field.name for field in fields(LoadRecord) if field.name not in (*_PROGRESS, *_OTHERS)))


class LoadFilter:
    """Remembers the last record that one watcher got.

    Changes of requests and of memory pass immediately, progress after `progress_interval_s`, and any record after `interval_s`.
    """

    def __init__(self, *, interval_s: float, progress_interval_s: float = PROGRESS_INTERVAL_S) -> None:
        self._progress_interval_s = progress_interval_s
        self._interval_s = interval_s
        self._last: LoadRecord | None = None
        self._last_draining = False
        self._last_at_s = 0.0

    def passes(self, load: LoadRecord, now_s: float, *, is_draining: bool) -> bool:
        """Returns whether the watcher gets this record. If so, later records are compared with it."""
        last = self._last
        if last is not None and is_draining == self._last_draining and not self._is_new(last, load, now_s):
            return False
        self._last, self._last_draining, self._last_at_s = load, is_draining, now_s
        return True

    def _is_new(self, last: LoadRecord, load: LoadRecord, now_s: float) -> bool:
        silent_s = now_s - self._last_at_s
        if silent_s >= self._interval_s or _requests(last) != _requests(load):
            return True
        if bool(last.kv_blocks_used) != bool(load.kv_blocks_used):
            return True
        if silent_s >= self._progress_interval_s and _progress(last) != _progress(load):
            return True
        return abs(load.kv_blocks_used - last.kv_blocks_used) * BLOCKS_SHARE > load.kv_blocks_total
