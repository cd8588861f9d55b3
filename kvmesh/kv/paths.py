"""The KV paths from prefill workers as one worker observes them: how fast they are, and which of them fail. No I/O; time is an argument."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvmesh.core import FailingKvPath, KvHandle, KvPath
from kvmesh.event_log import event_logger
from kvmesh.kv.path_causes import Cause, Failure, find_cause

_log = event_logger(__name__)

PATHS_MAX = 1024
"""Known paths. The one that was used longest ago is forgotten."""
LIMIT_MIN_S = 1.5
"""Shortest limit of a pull. On a busy host a process may lack the CPU for a second (seen with vLLM on two cores)."""
FIRST_LIMIT_S = 5.0
"""Time limit of the first pull on a path. It connects the two workers, which takes seconds on a busy machine."""
UNKNOWN_BYTES_PER_S = 4e8
"""Expected rate of a large pull while only small ones are known. With the margin, a link of 1 Gbit/s is fast enough."""
CHECK_LIMIT_S = 4.0
"""Limit of a check's pull. No request waits for it."""
MARGIN = 4.0
"""How much longer than expected a pull may take."""
WEIGHT = 0.25
"""Weight of a new measurement against all earlier ones."""
SMALL_BYTES = 1 << 16
"""Pulls up to this size measure the time to set a transfer up, larger ones the rate."""
CHECK_PAUSE_S = 1.0
CHECK_PAUSE_MAX_S = 2.0
"""Pause before the first check of a failing path, and the longest pause between checks.

It bounds the time until a repaired path is noticed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """A pull in progress, from `KvPaths.begin` until its end is reported."""

    worker_id: str
    epoch: int
    size_bytes: int
    started_at_s: float
    limit_s: float
    is_check: bool = False


@dataclass(slots=True, kw_only=True)
class _PathState:
    """`cause` None: the path does not fail. `detail` and `failed_wall_s` stay after it has recovered."""

    epoch: int
    pulls_total: int = 0
    failures_total: int = 0
    cause: Cause | None = None
    detail: str = ""
    failed_wall_s: float | None = None
    proven_at_s: float = -inf
    """Start of the newest pull that succeeded."""
    setup_s: float | None = None
    bytes_per_s: float | None = None
    check_at_s: float = 0.0
    pause_s: float = CHECK_PAUSE_S


@dataclass(slots=True, kw_only=True)
class KvPaths:
    """The paths to one worker, by the id of the prefill worker.

    1. Nothing but a check's handle is pulled over a failing path.
    2. A pull that succeeds, or a handle of a later epoch, ends the failure.
    3. Handles without a worker id have no path: they are always pulled, with the longest limit.
    """

    pull_timeout_s: float
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)
    """Held by each method. An engine with a thread of its own gives a real lock."""
    own_host: str = ""
    """Host of this worker's gRPC service, which helps to find causes."""
    failed_handoffs_total: int = 0
    recomputed_tokens_total: int = 0
    _hosts: dict[str, str] = field(default_factory=dict)
    _paths: dict[str, _PathState] = field(default_factory=dict)
    _checks: set[str] = field(default_factory=set)
    _running_bytes: int = 0

    def begin(self, handle: KvHandle, now_s: float, *, size_bytes: int | None = None) -> Pull | None:
        """Starts a pull. None: the path fails, so the prompt must be computed."""
        size = handle.kv_bytes or 0 if size_bytes is None else size_bytes
        with self.lock:
            is_check = handle.handle_id in self._checks
            limit_s = self.pull_timeout_s
            if handle.worker_id:
                path = self._path(handle.worker_id, handle.worker_epoch)
                if path.cause is not None and not is_check:
                    return None
                limit_s = CHECK_LIMIT_S if is_check else self._limit_s(path, size)
            self._running_bytes += size
            return Pull(
                worker_id=handle.worker_id,
                epoch=handle.worker_epoch,
                size_bytes=size,
                started_at_s=now_s,
                limit_s=min(limit_s, self.pull_timeout_s),
                is_check=is_check,
            )

    def _path(self, worker_id: str, epoch: int) -> _PathState:
        # Added again below: the order of `_paths` is that of their use.
        path = self._paths.pop(worker_id, None) or _PathState(epoch=epoch)
        if epoch > path.epoch:
            path.epoch, path.cause, path.pause_s = epoch, None, CHECK_PAUSE_S
        self._paths[worker_id] = path
        if len(self._paths) > PATHS_MAX:
            del self._paths[next(iter(self._paths))]
        return path

    def _limit_s(self, path: _PathState, size: int) -> float:
        """Pulls in progress share the network, so their bytes count too."""
        if path.setup_s is None and path.bytes_per_s is None:
            return FIRST_LIMIT_S
        expected_s = (path.setup_s or 0.0) + (self._running_bytes + size) / (path.bytes_per_s or UNKNOWN_BYTES_PER_S)
        return max(LIMIT_MIN_S, MARGIN * expected_s)

    def succeeded(self, pull: Pull, now_s: float, *, is_typical: bool = True) -> None:
        """Ends a pull. Ends the failure of its path. Learns from its time if that `is_typical`."""
        with self.lock:
            path = self._end(pull)
            if path is None:
                return
            path.pulls_total += 1
            if is_typical:
                # A clock may not advance during a fast pull.
                self._learn(path, pull.size_bytes, max(now_s - pull.started_at_s, 1e-6))
            path.proven_at_s = max(path.proven_at_s, pull.started_at_s)
            was_failing, path.cause, path.pause_s = path.cause is not None, None, CHECK_PAUSE_S
        if was_failing:
            _log.info("kv_path_recovered", prefill_worker_id=pull.worker_id)

    def _learn(self, path: _PathState, size: int, elapsed_s: float) -> None:
        if size <= SMALL_BYTES:
            path.setup_s = _average(path.setup_s, value=elapsed_s)
        else:
            path.bytes_per_s = _average(path.bytes_per_s, value=size / elapsed_s)

    def failed(self, pull: Pull, failure: Failure, *, now_s: float, wall_s: float) -> None:
        """Ends a pull that failed. Its path fails from now on, unless the path is not the cause."""
        with self.lock:
            path = self._end(pull)
            cause = find_cause(failure, source_host=self._hosts.get(pull.worker_id, ""), own_host=self.own_host)
            # A pull that began earlier than one that succeeded says nothing about the present.
            if path is None or cause is None or pull.started_at_s < path.proven_at_s:
                return
            before, path.cause = path.cause, cause
            path.failures_total += 1
            path.detail, path.failed_wall_s = cause.detail, wall_s
            if before is None:
                # Further failures of pulls that were in progress do not postpone the check.
                path.check_at_s = now_s + path.pause_s
        if before is None or before.reason != cause.reason:
            _log.warning("kv_path_failing", prefill_worker_id=pull.worker_id, reason=cause.reason, detail=cause.detail)

    def dropped(self, pull: Pull) -> None:
        """Ends a pull that says nothing about the path: its request was cancelled, or its handle was no longer valid."""
        with self.lock:
            self._end(pull)

    def _end(self, pull: Pull) -> _PathState | None:
        """Returns the path of a pull. None: it has none, or the source has restarted since."""
        self._running_bytes -= pull.size_bytes
        path = self._paths.get(pull.worker_id)
        return path if path is not None and path.epoch == pull.epoch else None

    def count_recomputed(self, handle: KvHandle, tokens: int) -> None:
        """Counts a handoff whose KV was not pulled. `tokens` of its prompt are computed. Checks are not counted."""
        with self.lock:
            if handle.handle_id not in self._checks:
                self.failed_handoffs_total += 1
                self.recomputed_tokens_total += tokens

    def expect_check(self, handle_id: str) -> None:
        """The handle belongs to a check: it is pulled even over a failing path. Until `end_check`."""
        with self.lock:
            self._checks.add(handle_id)

    def end_check(self, handle_id: str) -> None:
        with self.lock:
            self._checks.discard(handle_id)

    def due_checks(self, now_s: float) -> Sequence[str]:
        """Failing paths whose next check is due, by worker id."""
        with self.lock:
            return [each for each, path in self._paths.items() if path.cause is not None and path.check_at_s <= now_s]

    def put_off(self, worker_id: str, now_s: float) -> None:
        """Sets the time of the next check, after one was made or while one is being made."""
        with self.lock:
            if (path := self._paths.get(worker_id)) is not None:
                path.pause_s = min(2 * path.pause_s, CHECK_PAUSE_MAX_S)
                path.check_at_s = now_s + path.pause_s

    def set_host(self, worker_id: str, host: str) -> None:
        """The host of a prefill worker's gRPC service by the registry: pulls go there, and it helps to find causes."""
        with self.lock:
            self._hosts[worker_id] = host

    def host_of(self, worker_id: str) -> str:
        """Returns where the registry says that a prefill worker is. Empty: it is not listed."""
        with self.lock:
            return self._hosts.get(worker_id, "")

    def forget_others(self, worker_ids: Collection[str]) -> None:
        """Forgets prefill workers that have left the mesh."""
        with self.lock:
            for worker_id in {*self._paths, *self._hosts}.difference(worker_ids):
                self._paths.pop(worker_id, None)
                self._hosts.pop(worker_id, None)

    def failing(self) -> Sequence[FailingKvPath]:
        """Returns the failing paths."""
        with self.lock:
            return [
                FailingKvPath(worker_id=worker_id, reason=path.cause.reason)
                for worker_id, path in self._paths.items()
                if path.cause is not None
            ]

    def paths(self) -> Sequence[KvPath]:
        """Returns all paths, the one used last first."""
        with self.lock:
            return [
                KvPath(
                    worker_id=worker_id,
                    pulls_total=path.pulls_total,
                    failures_total=path.failures_total,
                    reason=path.cause.reason if path.cause is not None else "",
                    detail=path.detail,
                    last_failure_at_s=path.failed_wall_s,
                    bytes_per_s=path.bytes_per_s,
                )
                for worker_id, path in reversed(self._paths.items())
            ]

    def cause(self, worker_id: str) -> Cause | None:
        """Returns why a path fails. None: it does not."""
        with self.lock:
            path = self._paths.get(worker_id)
            return path.cause if path is not None else None

    def load_fields(self) -> Mapping[str, Any]:
        """Returns the fields of a load record about KV paths."""
        return {
            "failing_kv_paths": self.failing(),
            "failed_handoffs_total": self.failed_handoffs_total,
            "recomputed_tokens_total": self.recomputed_tokens_total,
        }


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (value - before)
