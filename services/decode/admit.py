"""Whether a decode worker takes one more request. Pure: the load is an argument."""

from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.core import LoadRecord
from kvmesh.errors import OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAdmission:
    """Sheds when more than `waiting_requests_max` requests wait for a place in the batch; 0 is no limit."""

    waiting_requests_max: int

    def check(self, legs: int, read_load: Callable[[], LoadRecord]) -> None:
        """OverloadedError when the queue is full; the wait is estimated from the step time, one place freed per step.

        Of the worker's `legs` no more can wait than there are, and its load takes a while to read.
        """
        if not self.waiting_requests_max or legs < self.waiting_requests_max:
            return
        load = read_load()
        if load.waiting_requests >= self.waiting_requests_max:
            raise OverloadedError(
                f"{load.waiting_requests} requests wait already",
                reason="decode_queue_full",
                retry_after_s=max(0.1, load.step_s * load.waiting_requests),
            )
