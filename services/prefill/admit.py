"""Whether a prefill worker takes one more prompt. Pure: the load is an argument."""

from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.core import LoadRecord
from kvmesh.errors import OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAdmission:
    """Sheds when more than `waiting_prompt_tokens_max` prompt tokens are accepted and not yet computed; 0 is no limit.

    One prompt is always taken when nothing waits, however long it is.
    """

    waiting_prompt_tokens_max: int

    def check(self, legs: int, read_load: Callable[[], LoadRecord], prompt_tokens: int) -> None:
        """OverloadedError when the prompt would not fit behind what waits. Nothing does without `legs` in the worker."""
        if not self.waiting_prompt_tokens_max or not legs:
            return
        load = read_load()
        waiting = load.waiting_prompt_tokens
        if waiting and waiting + prompt_tokens > self.waiting_prompt_tokens_max:
            raise OverloadedError(
                f"{waiting} prompt tokens wait already",
                reason="prefill_queue_full",
                retry_after_s=max(0.1, load.step_s),
            )
