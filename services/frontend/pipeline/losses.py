"""Failures of one request, counted by kind: whether it is placed again, or is itself the likely cause. Pure."""

from collections import deque

from kvmesh.errors import (
    ENGINE_DIED,
    IDLE_TIMEOUT,
    WORKER_LOST_TWICE,
    DeadlineError,
    InternalError,
    LostError,
    MeshError,
)
from services.frontend.settings import PipelineSettings

DEATHS_MAX = 2
"""One death may be an accident. A limit that operators could raise would let one request kill that many workers."""
STALLS_MAX = 2
"""Workers that may stop sending tokens of one request while they still send heartbeats."""
RECENT_S = 60.0
"""Workers that were lost within this time without the request show that workers die for other reasons."""
SAME_LOSS_S = 2.0
"""Losses of one worker within this time are one event: its requests notice them one after the other."""
_EVENTS_MAX = 64
_CONNECTION_LOST = LostError.default_reason


class LostWorkers:
    """The workers that this frontend lost lately, over all requests."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, str, float]] = deque(maxlen=_EVENTS_MAX)
        self._count = 0

    def add(self, worker_id: str, now: float) -> int:
        """Records a loss. Returns the number of the event, the same for all requests that lost the worker in it."""
        for number, lost_id, at_s in self._events:
            if lost_id == worker_id and now - at_s < SAME_LOSS_S:
                return number
        self._count += 1
        self._events.append((self._count, worker_id, now))
        return self._count

    def has_others(self, own: set[int], now: float) -> bool:
        """Returns whether a worker was lost lately in an event that is not in `own`."""
        return any(number not in own and now - at_s < RECENT_S for number, _, at_s in self._events)


class RetryLimits:
    """Counts the failures of one request."""

    def __init__(self, settings: PipelineSettings, lost_workers: LostWorkers) -> None:
        self._settings = settings
        self._lost_workers = lost_workers
        self._events: set[int] = set()
        self._refusals = self._losses = self._engine_deaths = self._stalls = 0
        self._barren_deaths = 0
        """Deaths in a row of workers of one role, between which the answer got no token."""
        self._died_at_prefill = False

    def count_failure(self, error: MeshError, *, has_progress: bool, is_prefill: bool, now: float) -> MeshError | None:
        """Counts a failure. Returns the error that ends the request, or None if it may be placed again.

        `has_progress`: the failed placement generated a token. `is_prefill`: its prefill worker failed.
        """
        if isinstance(error, DeadlineError):
            self._stalls += 1
            return error if self._stalls >= STALLS_MAX else None
        if not isinstance(error, LostError):
            self._refusals = 1 if has_progress else self._refusals + 1
            return error if self._refusals >= self._settings.placement_attempts else None
        self._losses += 1
        if error.reason in ENGINE_DIED or error.reason == _CONNECTION_LOST:
            is_same = not has_progress and is_prefill is self._died_at_prefill
            self._barren_deaths = self._barren_deaths + 1 if is_same else 1
            self._died_at_prefill = is_prefill
            self._events.add(self._lost_workers.add(error.where, now))
        self._engine_deaths += error.reason in ENGINE_DIED
        if self._engine_deaths >= DEATHS_MAX:
            return _poisonous(f"the engines of {DEATHS_MAX} workers died", error)
        if self._barren_deaths >= DEATHS_MAX and not self._lost_workers.has_others(self._events, now):
            return _poisonous(f"{DEATHS_MAX} workers were lost at the same token", error)
        return error if self._losses >= self._settings.worker_losses_max else None


def is_stall(error: MeshError) -> bool:
    """Returns whether a worker stopped sending tokens. Unlike the request's own deadline, another worker may do better."""
    return isinstance(error, DeadlineError) and error.reason == IDLE_TIMEOUT


def _poisonous(what: str, error: MeshError) -> InternalError:
    return InternalError(
        f"{what} while they ran this request; it is not tried again", reason=WORKER_LOST_TWICE, where=error.where
    )
