"""Ends an attempt at the request's deadline, or when a choice gets no token for too long."""

import asyncio

from kvmesh.clock import WAKING_S, Clock, stood_still
from kvmesh.errors import IDLE_TIMEOUT, DeadlineError, KvLostError
from services.frontend.pipeline.attempt_state import AttemptState
from services.frontend.pipeline.placements import CLOCK_GRAIN_S
from services.frontend.settings import PipelineSettings

HANDOFF_TIMEOUT_S = 10.0
"""Rendezvous handoff: longest wait for the first token after the prefill worker has sent the KV; then the request is placed again. The
decode worker only has to run a step."""


class TokenTimeouts:
    """One timer for all choices of an attempt."""

    def __init__(self, state: AttemptState, *, deadline_s: float, clock: Clock, settings: PipelineSettings) -> None:
        self._state = state
        self._deadline_s = deadline_s
        self._clock = clock
        self._settings = settings
        self._timer: asyncio.TimerHandle | None = None
        self._handoff_ends_s: dict[int, float] = {}
        """Rendezvous handoff, by choice: when the first token must have come, since the KV was sent."""
        self._due_s = float("inf")
        """When the timer is due."""
        self._is_waking = False
        """The timer fired late and was set once more."""

    def on_sent(self, i: int) -> None:
        """Rendezvous handoff: the prefill worker has sent the KV of a choice."""
        self._handoff_ends_s[i] = self._clock.now() + HANDOFF_TIMEOUT_S

    async def wait_end(self) -> None:
        """Waits until all choices are over. Raises DeadlineError at the deadline, or if a choice gets no token for too long."""
        self._check()
        try:
            await self._state.ended
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _check(self) -> None:
        """Fails the attempt if a timeout has passed; else sets the timer for the next one."""
        if self._state.ended.done():
            return
        silent_s = self._silence_ends_s()
        now_s = self._clock.now()
        left_s = min(self._deadline_s, silent_s) - now_s
        # Not twice in a row, or a process that is always late would never end its requests.
        self._is_waking = left_s <= 0 and not self._is_waking and stood_still(due_s=self._due_s, now_s=now_s)
        if self._is_waking:
            # This process was suspended, not the worker: its tokens or its end may be unread in the socket.
            left_s = WAKING_S
        if left_s > 0:
            # Timers may fire slightly early; without the grain this would become a busy loop.
            self._due_s = now_s + left_s + CLOCK_GRAIN_S
            self._timer = asyncio.get_running_loop().call_later(left_s + CLOCK_GRAIN_S, self._check)
            return
        self._fail(is_deadline=self._deadline_s <= silent_s, now_s=now_s)

    def _fail(self, *, is_deadline: bool, now_s: float) -> None:
        ended, where = self._state.ended, self._state.placement.decode.worker_id
        if is_deadline:  # No worker caused it.
            ended.set_exception(DeadlineError("the request's deadline has passed", where=where))
            return
        self._state.failed_worker_id = where
        if any(ends_s <= now_s for ends_s in self._handoff_ends()):
            message = f"the decode worker sent no token within {HANDOFF_TIMEOUT_S:g} s after the prefill worker had sent the KV"
            ended.set_exception(KvLostError(message, reason="handoff_timeout", where=where))
            return
        ended.set_exception(DeadlineError("the worker sent no token in time", reason=IDLE_TIMEOUT, where=where))

    def _silence_ends_s(self) -> float:
        """Returns when the first choice will have been without a token for too long; infinity if all are over."""
        silent_s = min(self._handoff_ends(), default=float("inf"))
        settings = self._settings
        for choice in self._state.choices.values():
            if not choice.is_over:
                allowed_s = settings.idle_timeout_s if choice.has_leg_tokens else settings.first_token_timeout_s
                silent_s = min(silent_s, choice.last_token_at_s + allowed_s)
        return silent_s

    def _handoff_ends(self) -> list[float]:
        """When the decode legs whose KV was sent and that have no token yet must have one."""
        choices = self._state.choices
        return [
            ends_s
            for i, ends_s in self._handoff_ends_s.items()
            if not (choices[i].has_leg_tokens or choices[i].is_over)
        ]
