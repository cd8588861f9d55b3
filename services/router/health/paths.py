"""Circuit breakers of the paths from frontends to workers. Pure; times are arguments.

If a frontend cannot reach a worker, the frontend's own link may be cut. So such failures pause only the path from this frontend to this
worker; other frontends continue to use the worker. If several frontends agree, `HealthMonitor` opens the worker's own breaker.

Invariants:
1. A path without failures in the last `FORGET_S` has no entry, unless it is paused. There are at most `PATHS_MAX` entries.
2. While a path is paused no request of its frontend is placed on its worker, except probes (see `Breaker`).
3. A frontend without a stream to this router, and a worker that left or was replaced, have no entries.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvmesh.errors import IDLE_TIMEOUT, WORKER_UNREACHABLE, DeadlineError, LostError, MeshError, UnavailableError
from services.router.health.breaker import Breaker, BreakerSettings, BreakerState

PATH_OPEN = "path_open"
"""Why a worker gets no requests of one frontend."""
PATHS_OPEN = "paths_open"
"""Reason of a refusal: the frontend has no working path to a decode worker."""
PAUSE_MAX_S = 2.0
"""Longest pause of a path.

It is short because the frontend knows whether its link is down: a probe costs no time, and the path is used soon after it works again.
"""
AGREEING_FRONTENDS_MIN = 2
"""Frontends that must lose a worker before the others stop using it. Those of one host share its link, so they count as one."""
FORGET_S = 60.0
"""Time after its last failure for which a path that is not paused is remembered."""
PATHS_MAX = 16_384
LINK_REASONS = frozenset(
    {
        *(each.default_reason for each in (UnavailableError, LostError, DeadlineError)),
        *(WORKER_UNREACHABLE, "worker_silent", IDLE_TIMEOUT),
    }
)
"""Reasons of failures that a cut between the frontend and the worker causes. A failure that the worker itself reports has another one."""
_NONE: frozenset[str] = frozenset()


def is_link_fault(error: MeshError | None) -> bool:
    """Returns True for a failure that the path or the worker may be to blame for."""
    return isinstance(error, UnavailableError | LostError | DeadlineError) and error.reason in LINK_REASONS


@dataclass(slots=True, eq=False, kw_only=True)
class _FailingPath:
    breaker: Breaker
    failed_at: float


class PathBreakers:
    """The paths that failed lately, by frontend and worker."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = replace(
            settings, pause_max_s=max(settings.pause_min_s, min(settings.pause_max_s, PAUSE_MAX_S))
        )
        self._frontends: dict[str, str] = {}
        """Those with a stream to this router, with their hosts."""
        self._paths: dict[str, dict[str, _FailingPath]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add_frontend(self, frontend_id: str, host: str = "") -> None:
        """`host` is the address that the frontend's stream comes from. Empty: unknown."""
        self._frontends[frontend_id] = host or frontend_id

    def remove_frontend(self, frontend_id: str) -> None:
        self._frontends.pop(frontend_id, None)
        self._size -= len(self._paths.pop(frontend_id, ()))

    def remove_worker(self, worker_id: str) -> None:
        for frontend_id in list(self._paths):
            self._remove(frontend_id, worker_id=worker_id)

    def is_sole(self, frontend_id: str) -> bool:
        """Returns True if no other frontend is connected, so that a failing path looks like a failing worker."""
        return not self._frontends.keys() - {frontend_id}

    def paused(self, frontend_id: str, now: float) -> frozenset[str]:
        """Returns the workers that get no requests of this frontend."""
        paths = self._paths.get(frontend_id)
        if not paths:
            return _NONE
        for path in paths.values():
            path.breaker.advance(now)
        return frozenset(worker_id for worker_id, path in paths.items() if not path.breaker.admits)

    def apply(
        self,
        change: Callable[[Breaker, str, float], None],
        *,
        frontend_id: str,
        worker_id: str,
        reservation_id: str,
        now: float,
    ) -> BreakerState | None:
        """Applies a change of the worker's breaker, other than a failure, to the path too. Returns its state if the state changed."""
        path = self._paths.get(frontend_id, {}).get(worker_id)
        if path is None:
            return None
        before = path.breaker.state
        change(path.breaker, reservation_id, now)
        return path.breaker.state if path.breaker.state is not before else None

    def on_failure(self, *, frontend_id: str, worker_id: str, reservation_id: str, now: float) -> bool:
        """Records that the frontend lost the worker. Returns True if that paused the path."""
        path = self._paths.get(frontend_id, {}).get(worker_id)
        if path is None:
            if self._size >= PATHS_MAX or frontend_id not in self._frontends:
                return False
            path = _FailingPath(breaker=Breaker(self._settings), failed_at=now)
            self._paths.setdefault(frontend_id, {})[worker_id] = path
            self._size += 1
        before = path.breaker.state
        path.failed_at = now
        path.breaker.on_failure(reservation_id, now)
        return path.breaker.state is BreakerState.OPEN and before is not BreakerState.OPEN

    def agree(self, worker_id: str, *, answered_at: float) -> bool:
        """Returns True if several frontends lost the worker, and it has answered no frontend since (`answered_at`)."""
        lost = [
            frontend_id
            for frontend_id, paths in self._paths.items()
            if (path := paths.get(worker_id)) is not None
            and path.breaker.state is not BreakerState.CLOSED
            and path.failed_at >= answered_at
        ]
        # When a host's link is cut, all its processes lose the worker together. If all frontends are on this host, no other frontend is
        # affected.
        if len(set(self._frontends.values())) > 1:
            lost = list({self._frontends.get(each, each) for each in lost})
        return len(lost) >= AGREEING_FRONTENDS_MIN

    def retry_after_s(self, frontend_id: str, worker_ids: Iterable[str], now: float) -> float:
        """When the first of the paths to these workers may be tried, at the earliest."""
        paths = self._paths.get(frontend_id, {})
        waits = [paths[worker_id].breaker.retry_after_s(now) for worker_id in worker_ids if worker_id in paths]
        return min(waits, default=self._settings.pause_min_s)

    def paused_frontends(self, worker_id: str) -> list[str]:
        """Returns the frontends whose path to the worker is not closed."""
        return sorted(
            frontend_id
            for frontend_id, paths in self._paths.items()
            if worker_id in paths and paths[worker_id].breaker.state is not BreakerState.CLOSED
        )

    def count_open(self) -> int:
        """Paths that are not closed."""
        return sum(
            path.breaker.state is not BreakerState.CLOSED for paths in self._paths.values() for path in paths.values()
        )

    def forget_healthy(self, now: float) -> None:
        """Removes paths that have not failed for a while. To be called regularly."""
        for frontend_id, paths in list(self._paths.items()):
            for worker_id, path in list(paths.items()):
                if path.breaker.state is BreakerState.CLOSED and now - path.failed_at >= FORGET_S:
                    self._remove(frontend_id, worker_id=worker_id)

    def _remove(self, frontend_id: str, worker_id: str) -> None:
        paths = self._paths.get(frontend_id, {})
        if paths.pop(worker_id, None) is not None:
            self._size -= 1
            if not paths:
                del self._paths[frontend_id]
