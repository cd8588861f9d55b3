"""Which legs a prefill worker takes. Pure: the load is an argument."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvmesh.core import Capabilities, Handoff, Leg, LegTask, LoadRecord, Role
from kvmesh.errors import InvalidRequestError, OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAdmission:
    """Sheds when more than `waiting_prompt_tokens_max` prompt tokens are accepted and not yet computed; 0: no limit.

    One prompt is always taken when none waits, however long it is.
    """

    waiting_prompt_tokens_max: int

    def tasks(self, capabilities: Capabilities) -> Collection[LegTask]:
        """PREFILL; and GENERATE, which `check` limits to a single token, on engines that generate without a decode worker."""
        if Role.DECODE in capabilities.roles and Handoff.RENDEZVOUS not in capabilities.handoffs:
            return (LegTask.PREFILL, LegTask.GENERATE)
        return (LegTask.PREFILL,)

    def check(self, leg: Leg, legs: int, read_load: Callable[[], LoadRecord]) -> None:
        """InvalidRequestError for an answer of several tokens; OverloadedError when the prompt does not fit the queue."""
        generation = leg.generation
        if leg.task is LegTask.GENERATE and generation.sampling.max_tokens != len(generation.emitted_token_ids) + 1:
            raise InvalidRequestError(
                "a prefill worker generates one token: max_tokens must be one above the number of emitted tokens",
                field="generation.sampling.max_tokens",
            )
        if not self.waiting_prompt_tokens_max or not legs:
            return
        load = read_load()
        waiting = load.waiting_prompt_tokens
        if waiting and waiting + len(generation.token_ids) > self.waiting_prompt_tokens_max:
            raise OverloadedError(
                f"{waiting} prompt tokens wait already",
                reason="prefill_queue_full",
                retry_after_s=max(0.1, load.step_s),
            )
