"""What the parts of one placement of a request share: the choices, how it ends, and which worker caused its failure."""

import asyncio
from collections.abc import Mapping

from kvmesh.clock import Clock
from kvmesh.core import Handoff, Usage, WorkerRef
from kvmesh.errors import DeadlineError, KvLostError, MeshError
from kvmesh.rpc.clients import Placed
from services.frontend.pipeline.choice_sink import ChoiceSink


class AttemptState:
    """Invariant: `ended` has a result once all choices are over, or the first failure."""

    def __init__(self, placed: Placed, *, number: int, deadline_s: float, clock: Clock) -> None:
        self.placed = placed
        self.placement = placed.placement
        self.suffix = f"-{number}" if number else ""
        """Ends the ids of its legs."""
        self._deadline_s = deadline_s
        self._clock = clock
        self.began_s = clock.now()
        """When the placement was received."""
        self.choices: Mapping[int, ChoiceSink] = {}
        """The choices that are not over, by number."""
        self.last = 0
        """Number of the last placement."""
        self._open = 0
        self._tokens_before = 0
        """Tokens that the choices received in earlier attempts."""
        self.has_token = False
        """A leg of this attempt has generated a token."""
        self.uses_decode = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed_worker_id = ""
        """The worker that the next placement excludes; empty if no worker caused the failure."""
        self.prefill_usage: Usage | None = None
        """Usage of the prefill worker's first leg; None if no prefill worker has computed the prompt."""
        self.is_exchange_failure = False
        """The legs of a rendezvous lost each other. Either worker may be the cause, so that no breaker counts it: one decode worker that
        cannot receive would open those of all prefill workers."""

    def begin(self, choices: Mapping[int, ChoiceSink]) -> None:
        """Takes the choices to run; at least one."""
        self.choices = choices
        self.last = max(choices)
        self._open = len(choices)
        self._tokens_before = sum([choice.tokens for choice in choices.values()])

    def move_to(self, placed: Placed, began_s: float) -> None:
        """Continues with another placement of the same ask on the same decode worker, received at `began_s`."""
        self.placed, self.placement, self.began_s = placed, placed.placement, began_s

    def on_over(self, choice: ChoiceSink, error: MeshError | None) -> None:
        """A choice ended; `error` is None if it succeeded."""
        if self.ended.done():
            return
        if error is not None:
            if not isinstance(error, KvLostError):
                self.failed_worker_id = self.placement.decode.worker_id
            elif self.placement.handoff is Handoff.RENDEZVOUS and self.placement.prefill is not None:
                # The decode worker found no counterpart, or the wrong one.
                self.exclude_counterpart(self.placement.prefill)
            self.ended.set_exception(error)
            return
        self._open -= 1
        if self._open == 0:
            self.ended.set_result(None)

    def exclude_counterpart(self, worker: WorkerRef) -> None:
        """Records that the legs of a rendezvous lost each other."""
        self.failed_worker_id = worker.worker_id
        self.is_exchange_failure = True

    @property
    def has_failed_at_prefill(self) -> bool:
        """True if the prefill worker caused the failure."""
        prefill = self.placement.prefill
        return prefill is not None and prefill.worker_id == self.failed_worker_id

    def left_s(self) -> float:
        """Returns the time until the request's deadline. Raises DeadlineError when it has passed."""
        left_s = self._deadline_s - self._clock.now()
        if left_s <= 0:
            raise DeadlineError("the request's deadline has passed")
        return left_s

    def output_tokens(self) -> int:
        """Returns the tokens received in this attempt so far, over all choices."""
        return sum([choice.tokens for choice in self.choices.values()]) - self._tokens_before

    def cached_tokens(self) -> int | None:
        """Returns the prompt tokens in the cache of the worker that computed the prompt; None: not known.

        The usage of the answer and the reports to the router both use it.
        """
        if self.prefill_usage is not None:
            return self.prefill_usage.cached_tokens
        finish = next(iter(self.choices.values())).finish if self.choices else None
        # A leg that failed has no usage.
        return None if finish is None or finish.error is not None else finish.usage.cached_tokens
