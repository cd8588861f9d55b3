"""Counts the failures of one request by kind, and decides whether to place it again or to blame the request itself. Pure."""

from collections.abc import Collection

from kvmesh.errors import (
    ENGINE_DIED,
    IDLE_TIMEOUT,
    WORKER_LOST_TWICE,
    WORKER_UNREACHABLE,
    DeadlineError,
    InternalError,
    LostError,
    MeshError,
)
from services.frontend.settings import PipelineSettings

DEATHS_MAX = 2
"""One death may be an accident. A limit that operators could raise would let one request kill that many workers."""
LOSSES_MAX = 8
"""Workers that may be lost in any way under one request. A rollout or a lost host may take several before routers learn of it."""
STALLS_MAX = 2
"""Workers that may stop sending tokens of one request while they still send heartbeats."""
RECENT_S = 60.0
"""Workers that were lost within this time without the request show that workers die for other reasons."""
_CONNECTION_LOST = LostError.default_reason


class LostWorkers:
    """The workers whose connections broke lately, whether or not they had a request."""

    def __init__(self) -> None:
        self._lost_s: dict[str, float] = {}

    def add(self, worker_id: str, now: float) -> None:
        """Records a loss."""
        self._lost_s = {each: at_s for each, at_s in self._lost_s.items() if now - at_s < RECENT_S}
        self._lost_s[worker_id] = now

    def has_others(self, own: Collection[str], now: float) -> bool:
        """Returns whether a worker that is not in `own` was lost lately."""
        return any(worker_id not in own and now - at_s < RECENT_S for worker_id, at_s in self._lost_s.items())


class RetryLimits:
    """Counts the failures of one request."""

    def __init__(self, settings: PipelineSettings, lost_workers: LostWorkers) -> None:
        self._settings = settings
        self._lost_workers = lost_workers
        self._lost_ids: set[str] = set()
        self._refusals = self._losses = self._engine_deaths = self._stalls = 0
        self._suspect_losses = 0
        """In a row, of workers of one role: those of which the request may be the cause."""
        self._was_prefill = False

    def count_failure(self, error: MeshError, *, has_progress: bool, is_prefill: bool, now: float) -> MeshError | None:
        """Counts a failure. Returns the error that ends the request, or None if it may be placed again.

        `has_progress`: the failed placement generated a token. `is_prefill`: its prefill worker failed.
        """
        if isinstance(error, DeadlineError):
            self._stalls += 1
            return error if self._stalls >= STALLS_MAX else None
        # A refusal, or lost KV. A placement that generated a token ends the row of them.
        if not isinstance(error, LostError) and error.reason != WORKER_UNREACHABLE:
            self._refusals = 1 if has_progress else self._refusals + 1
            return error if self._refusals >= self._settings.placement_attempts else None
        self._losses += 1
        is_engine_death = error.reason in ENGINE_DIED
        if is_engine_death or error.reason == _CONNECTION_LOST:
            self._lost_workers.add(error.where, now)
            self._lost_ids.add(error.where)
            self._count_suspect_loss(
                is_suspect=is_engine_death or not has_progress, starts_row=has_progress, is_prefill=is_prefill
            )
        self._engine_deaths += is_engine_death
        if self._engine_deaths >= DEATHS_MAX:
            return _poisonous(f"the engines of {DEATHS_MAX} workers died", error)
        if self._suspect_losses >= DEATHS_MAX and not self._lost_workers.has_others(self._lost_ids, now):
            return _poisonous(f"{DEATHS_MAX} workers were lost before they generated a token", error)
        return error if self._losses >= LOSSES_MAX else None

    def _count_suspect_loss(self, *, is_suspect: bool, starts_row: bool, is_prefill: bool) -> None:
        """Counts a lost worker whose engine died, or whose connection broke before it generated a token of the request.

        A worker that has generated tokens of the request can serve it. If a later token killed it nevertheless, the next worker
        computes that token with the prompt, and dies before it generates one. Then two such losses end the request.
        """
        if not is_suspect:
            self._suspect_losses = 0
        elif starts_row or is_prefill is not self._was_prefill:
            self._suspect_losses = 1
        else:
            self._suspect_losses += 1
        self._was_prefill = is_prefill


def is_stall(error: MeshError) -> bool:
    """Returns whether a worker stopped sending tokens. Unlike the request's own deadline, another worker may do better."""
    return isinstance(error, DeadlineError) and error.reason == IDLE_TIMEOUT


def _poisonous(what: str, error: MeshError) -> InternalError:
    return InternalError(
        f"{what} while they ran this request; it is not tried again", reason=WORKER_LOST_TWICE, where=error.where
    )
