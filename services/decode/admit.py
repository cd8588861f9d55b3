"""Which legs a decode worker takes. Pure: the load is an argument."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvmesh.core import Capabilities, Leg, LegTask, LoadRecord
from kvmesh.errors import OverloadedError

EMBEDDINGS = "embeddings"


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
                f"{waiting} requests wait already",
                reason="decode_queue_full",
                retry_after_s=max(0.1, load.step_s * waiting),
            )
