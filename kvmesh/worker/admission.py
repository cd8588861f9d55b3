"""Which legs a worker takes in each role. Pure: the load is an argument."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core import Capabilities, Handoff, Leg, LegTask, LoadRecord, Role
from kvmesh.errors import InvalidRequestError, OverloadedError

EMBEDDINGS = "embeddings"


class RoleAdmission(Protocol):
    """Decides which legs a worker accepts in one role."""

    def tasks(self, capabilities: Capabilities) -> Collection[LegTask]:
        """Tasks that an engine of these capabilities runs in the role."""
        ...

    def check(self, leg: Leg, legs: int, read_load: Callable[[], LoadRecord]) -> None:
        """Raises a MeshError if the leg is not accepted now. `legs`: the worker's live legs, which are cheaper to read than the load."""
        ...


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
        length = len(generation.token_ids) + len(generation.emitted_token_ids)
        if waiting and waiting + length > self.waiting_prompt_tokens_max:
            raise OverloadedError(
                f"{waiting} prompt tokens are already waiting",
                reason="prefill_queue_full",
                retry_after_s=max(0.1, load.step_s),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAdmission:
    """Sheds when more than `waiting_requests_max` legs wait for a place in the batch; 0: no limit."""

    waiting_requests_max: int

    def tasks(self, capabilities: Capabilities) -> Collection[LegTask]:
        """GENERATE; and EMBED, on engines with the feature."""
        if EMBEDDINGS in capabilities.features:
            return (LegTask.GENERATE, LegTask.EMBED)
        return (LegTask.GENERATE,)

    def check(self, leg: Leg, legs: int, read_load: Callable[[], LoadRecord]) -> None:
        """OverloadedError when the queue is full. The wait is estimated from the step time: one place is freed per step."""
        # No more legs can wait than there are, and the load takes longer to read.
        if not self.waiting_requests_max or legs < self.waiting_requests_max:
            return
        load = read_load()
        waiting = load.waiting_requests + load.preallocating_requests + load.retracted_requests
        if waiting >= self.waiting_requests_max:
            raise OverloadedError(
                f"{waiting} requests are already waiting",
                reason="decode_queue_full",
                retry_after_s=max(0.1, load.step_s * waiting),
            )


def admissions(*, waiting_prompt_tokens_max: int, waiting_requests_max: int) -> Mapping[Role, RoleAdmission]:
    """Returns the rule of each role. A worker that changes its role changes its rule."""
    return {
        Role.PREFILL: PrefillAdmission(waiting_prompt_tokens_max=waiting_prompt_tokens_max),
        Role.DECODE: DecodeAdmission(waiting_requests_max=waiting_requests_max),
    }
