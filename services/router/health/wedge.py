"""Whether a worker that has work still makes steps. Pure; times are arguments.

A worker can answer all its RPCs while its engine hangs. Its load records give it away: work, and no step. An engine whose
record is as old as its last step shows no work either; then the router's own placements do, once they are overdue.
"""

from dataclasses import dataclass

from kvmesh.core import LoadRecord, PerformanceProfile
from kvmesh.settings import setting

_FORGETTING = 0.95
"""What is left of the slowest step with each later one: a single long prompt is forgotten after a hundred steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WedgeSettings:
    """When a worker counts as wedged."""

    step_factor: float = setting(
        10.0, "A worker with work that makes no step for so many times its expected step is wedged.", min=1
    )
    wait_min_s: float = setting(
        15.0,
        "It is given at least so long: a transfer that hangs, or a first step that compiles, is no wedged engine.",
        min=0.01,
    )
    wait_max_s: float = setting(120.0, "It is given at most so long, however slow its steps are.", min=0.01)


class StepWatch:
    """The steps of one rank of a worker."""

    __slots__ = ("_marker", "_settings", "_slowest_step_s", "_stepped_at", "_working_since")

    def __init__(self, settings: WedgeSettings) -> None:
        self._settings = settings
        self._marker: tuple[int, ...] | None = None
        self._stepped_at = -float("inf")
        self._working_since: float | None = None
        self._slowest_step_s = 0.0

    def told(self, record: LoadRecord, now: float) -> bool:
        """A load record came. True: steps were made since the one before."""
        marker = (record.step, record.prompt_tokens_total, record.output_tokens_total, record.transferred_tokens_total)
        has_moved = marker != self._marker and self._marker is not None
        if marker != self._marker:
            self._marker = marker
            self._stepped_at = now
            self._working_since = None
            self._slowest_step_s = max(record.step_s, _FORGETTING * self._slowest_step_s)
        # Requests that wait for blocks which leases hold are held up by whoever does not fetch them, until the leases end.
        waits_for_leases = record.kv_blocks_leased > 0
        has_work = record.running_requests > 0 or (record.waiting_requests > 0 and not waits_for_leases)
        if not has_work:
            self._working_since = None
        elif self._working_since is None:
            self._working_since = now
        return has_moved

    def excuse(self, now: float) -> None:
        """Nobody listened for a while: what it has to do counts from now."""
        if self._working_since is not None:
            self._working_since = now

    def allowed_s(self, profile: PerformanceProfile | None, prompt_tokens: int) -> float:
        """How long it may go without a step, with so many prompt tokens before it: they may be computed in one."""
        expected_s = self._slowest_step_s
        if profile is not None:
            per_token_s = profile.prefill_s_per_token or 0.0
            expected_s = max(expected_s, (profile.prefill_base_s or 0.0) + per_token_s * prompt_tokens)
        settings = self._settings
        return min(settings.wait_max_s, max(settings.wait_min_s, settings.step_factor * expected_s))

    def is_stuck(self, now: float, allowed_s: float) -> bool:
        """It says that it has work, and makes no step."""
        return self._working_since is not None and now - self._working_since > allowed_s

    def has_stepped_since(self, since: float) -> bool:
        """True when a step was made, or its first record came, after that."""
        return self._stepped_at > since

    def is_overdue(self, now: float, allowed_s: float, due_at: float) -> bool:
        """Work that was due at `due_at` has not led to a single step since. A step after that shows an engine that lives."""
        return due_at > self._stepped_at and now - due_at > allowed_s
