"""Reports vLLM's pulls to the KV paths. On the engine thread.

The runner sees a pull only between steps, and a short one not at all: its success shows in the statistics of the prompt.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvmesh.engines.vllm.core import VllmCore
from kvmesh.engines.vllm.leg import VllmLeg
from kvmesh.kv.path_causes import Failure
from kvmesh.kv.paths import KvPaths

POLLS_MIN = 3
"""A pull is late only after this many steps have seen it, because the end of a transfer is reported one step after it occurs."""


@dataclass(frozen=True, slots=True)
class PullReports:
    """The path of each leg's pull. `VllmLeg.pull` is the state."""

    core: VllmCore
    paths: KvPaths
    now: Callable[[], float]

    def begin(self, leg: VllmLeg) -> bool:
        """Returns False if the path fails, so that the prompt must be computed."""
        assert leg.request.handle is not None
        leg.pull = self.paths.begin(leg.request.handle, self.now())
        return leg.pull is not None

    def is_late(self, leg: VllmLeg, now_s: float) -> bool:
        """Call it for a pull in progress, after each step. The limit counts from the first call."""
        assert leg.pull is not None
        if leg.pull_ends_s is None:
            leg.pull = replace(leg.pull, started_at_s=now_s)
            leg.pull_ends_s = now_s + leg.pull.limit_s
        leg.pull_polls += 1
        return now_s >= leg.pull_ends_s and leg.pull_polls >= POLLS_MIN

    def timed_out(self, leg: VllmLeg) -> None:
        assert leg.pull is not None
        self._failed(leg, "kv_pull_timeout", message=f"a pull did not end within {leg.pull.limit_s:.1f} s")

    def ended(self, leg: VllmLeg, now_s: float) -> None:
        """The transfer has ended. A failed one is reported now."""
        leg.pulled_at_s = now_s
        if leg.was_recomputed:
            found = next(filter(None, self.core.call_workers("kvmesh_pull_failure", leg.inner_id)), None)
            self._failed(leg, *(found or ("failed", "vLLM could not pull the KV")))
            self.recomputed(leg)

    def prompt_done(self, leg: VllmLeg, transferred_tokens: int) -> None:
        """The prompt is in the cache. Without a transfer all of it was there already."""
        if leg.pull is None or not transferred_tokens:
            self.drop(leg)
            return
        pull, leg.pull = leg.pull, None
        ended_s = leg.pulled_at_s
        self.paths.succeeded(
            pull,
            self.now() if ended_s is None else ended_s,
            is_typical=leg.pull_ends_s is not None and ended_s is not None,
        )

    def drop(self, leg: VllmLeg) -> None:
        """The leg no longer pulls."""
        if leg.pull is not None:
            pull, leg.pull = leg.pull, None
            self.paths.dropped(pull)

    def is_path_failing(self, leg: VllmLeg) -> bool:
        """Returns True for a leg that waits to pull over a path that has started to fail since then."""
        pull = leg.pull
        return pull is not None and not pull.is_check and self.paths.cause(pull.worker_id) is not None

    def recomputed(self, leg: VllmLeg) -> None:
        if leg.request.handle is not None:
            self.paths.count_recomputed(leg.request.handle, leg.prompt_tokens)

    def _failed(self, leg: VllmLeg, reason: str, message: str) -> None:
        if leg.pull is None or leg.parameters is None:
            return
        pull, leg.pull = leg.pull, None
        failure = Failure(reason=reason, message=message, peer=str(leg.parameters["remote_host"]))
        self.paths.failed(pull, failure, now_s=self.now(), wall_s=time.time())
