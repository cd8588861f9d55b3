"""Detects wedged engines: workers that have work and make no steps. Pure; times are arguments.

A worker can answer all its RPCs while its engine hangs. Its load records show it: work, and no step. The record of an engine that hung in
its first step shows no work either; then the router's own placements do, once they are overdue.
"""

from kvmesh.core import LoadRecord, PerformanceProfile

_SLOWEST_STEP_DECAY = 0.95
"""Per step: a single long prompt is forgotten after a hundred steps."""


STEP_FACTOR = 10.0
"""A worker with work that makes no step for this many times its expected step time is wedged. Step times under one load differ by less."""
WAIT_MIN_S = 15.0
"""Shortest time without a step that counts: a transfer may hang until it times out, and a first step may compile."""
WAIT_MAX_S = 120.0
"""Longest time without a step, however slow the worker's steps are, because requests wait during it."""


class StepWatch:
    """The steps of one rank of a worker."""

    __slots__ = ("_progress", "_slowest_step_s", "_stepped_at", "_working_since")

    def __init__(self) -> None:
        self._progress: tuple[int, ...] | None = None
        self._stepped_at = -float("inf")
        self._working_since: float | None = None
        self._slowest_step_s = 0.0

    def on_load_record(self, record: LoadRecord, now: float) -> bool:
        """Returns True if the engine made steps since the previous record."""
        progress = (
            record.step,
            record.prompt_tokens_total,
            record.output_tokens_total,
            record.transferred_tokens_total,
        )
        has_stepped = progress != self._progress and self._progress is not None
        if progress != self._progress:
            self._progress = progress
            self._stepped_at = now
            self._working_since = None
            self._slowest_step_s = max(record.step_s, _SLOWEST_STEP_DECAY * self._slowest_step_s)
        # Requests that wait for leased blocks are held up by the workers that have not fetched them, until the leases end.
        waits_for_leases = record.kv_blocks_leased > 0
        has_work = record.running_requests > 0 or (record.waiting_requests > 0 and not waits_for_leases)
        if not has_work:
            self._working_since = None
        elif self._working_since is None:
            self._working_since = now
        return has_stepped

    def excuse(self, now: float) -> None:
        """The router did not read records for a while: the time without a step starts now."""
        if self._working_since is not None:
            self._working_since = now

    def allowed_s(self, profile: PerformanceProfile | None, prompt_tokens: int) -> float:
        """Returns how long the engine may go without a step; the queued prompt tokens may be computed in one step."""
        expected_s = self._slowest_step_s
        if profile is not None:
            per_token_s = profile.prefill_s_per_token or 0.0
            expected_s = max(expected_s, (profile.prefill_base_s or 0.0) + per_token_s * prompt_tokens)
        return min(WAIT_MAX_S, max(WAIT_MIN_S, STEP_FACTOR * expected_s))

    def is_stuck(self, now: float, *, allowed_s: float) -> bool:
        """Returns True if the records show work, and no step for longer than allowed."""
        return self._working_since is not None and now - self._working_since > allowed_s

    def has_stepped_lately(self, now: float) -> bool:
        """Returns True when a step was made, or the first record came, within `WAIT_MIN_S`."""
        return self._stepped_at > now - WAIT_MIN_S

    def is_overdue(self, now: float, *, allowed_s: float, due_at: float) -> bool:
        """Work that was placed at `due_at` led to no step. A later step shows that the engine is alive."""
        return due_at > self._stepped_at and now - due_at > allowed_s
