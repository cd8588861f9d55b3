"""How long KV takes from a prefill worker to a decode worker, by their distance; learned from observed handoffs."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

from services.router.workers.coefficients import CoefficientSource, LinearModel
from services.router.workers.target_arrays import Floats

F = TypeVar("F", float, Floats)


class Distance(IntEnum):
    """Between two workers: on one host, in one zone, or farther."""

    HOST = 0
    ZONE = 1
    FAR = 2


HANDOFF_S = 0.002
"""Seconds of a handoff that do not depend on its size, until they are learned: one more call and one read."""
BYTES_PER_S = {Distance.HOST: 20e9, Distance.ZONE: 10e9, Distance.FAR: 2.5e9}
"""Bytes of KV per second by distance, until they are learned: shared memory or PCIe, RDMA, TCP."""


class HandoffTime(NamedTuple):
    """The term `transfer`: handoff + tokens * bytes_per_token / bandwidth."""

    handoff_s: float
    s_per_byte: float

    def seconds_of(self, transfer_bytes: float) -> float:
        return self.s_per_byte * transfer_bytes + self.handoff_s

    def seconds(self, tokens: F, *, bytes_per_token: float) -> F:
        return self.s_per_byte * bytes_per_token * tokens + self.handoff_s


HandoffTimes = Sequence[HandoffTime]
"""By distance. A farther distance takes at least as long as a nearer one."""

NO_HANDOFF_TIMES: HandoffTimes = (HandoffTime(handoff_s=0.0, s_per_byte=0.0),) * len(Distance)
"""For policies that do not count the transfer."""


class HandoffEstimator:
    """Learns the handoff times.

    A nearer pair is never believed to be slower than a farther one: a few slow reads must not move traffic to a slower network, and the
    pair search (`placement/pair_search.py`) relies on it.
    """

    def __init__(self) -> None:
        self._models = [
            LinearModel(
                [
                    (f"{distance.name.lower()}_handoff_s", HANDOFF_S, CoefficientSource.DEFAULT),
                    (f"{distance.name.lower()}_s_per_byte", 1 / bandwidth, CoefficientSource.DEFAULT),
                ]
            )
            for distance, bandwidth in BYTES_PER_S.items()
        ]
        self.times: HandoffTimes = self._ordered_times()

    def learn(self, distance: Distance, *, transfer_bytes: float, observed_s: float) -> None:
        self._models[distance].learn(observed_s, 1, transfer_bytes)
        self.times = self._ordered_times()

    def observations(self, distance: Distance) -> int:
        """Handoffs that the time of a distance was learned from."""
        return self._models[distance].observations[0]

    def _ordered_times(self) -> HandoffTimes:
        handoff_s, s_per_byte = 0.0, 0.0
        times = []
        for model in self._models:
            handoff_s, s_per_byte = max(handoff_s, model.values[0]), max(s_per_byte, model.values[1])
            times.append(HandoffTime(handoff_s=handoff_s, s_per_byte=s_per_byte))
        return times
