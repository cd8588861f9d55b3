"""Pairs of workers whose handoffs fail, or take longer than others at the same distance. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.router.workers.handoff_times import HandoffTimes
from services.router.workers.target_arrays import Floats, Positions
from services.router.workers.worker import Target

KV_PATH_FAILING = "kv_path_failing"
"""Why a pair is not used: the decode worker cannot pull KV from the prefill worker."""
SlowFactors = Mapping[str, Mapping[str, float]]
"""How many times longer than expected a handoff takes, by the ids of the decode and the prefill worker. Other pairs take as long as expected."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BadPairs:
    """The bad pairs of a group, one row per prefill candidate, one column per decode candidate that is in a bad pair."""

    column_of: Mapping[int, int]
    """The columns of decode candidates, by their positions in the group."""
    decodes: Positions
    """The positions of the decode candidates, by column."""
    is_failing: NDArray[np.bool_]
    factors: Floats
    distances: Positions

    def transfer_s(self, moved_tokens: Floats, handoff_times: HandoffTimes, *, bytes_per_token: float) -> Floats:
        """Returns the time of each handoff; infinite where KV does not pass. `moved_tokens` has one value per column."""
        handoff_s, s_per_byte = (np.array(values) for values in zip(*handoff_times, strict=True))
        seconds = handoff_s[self.distances] + s_per_byte[self.distances] * (bytes_per_token * moved_tokens)
        return np.where(self.is_failing, np.inf, seconds * self.factors)

    def column(self, decode: int) -> tuple[NDArray[np.bool_], Floats] | None:
        """Returns which handoffs to a decode candidate fail, and the factors of their times. None: it is in no bad pair."""
        number = self.column_of.get(decode)
        return None if number is None else (self.is_failing[:, number], self.factors[:, number])

    def factor(self, prefill: int, decode: int) -> float:
        """Returns the factor of a pair's time, given its positions in the group; infinite if KV does not pass."""
        column = self.column(decode)
        if column is None:
            return 1.0
        return float("inf") if column[0][prefill] else column[1].item(prefill)


def failing_paths(decode: Target) -> Mapping[str, str]:
    """Returns the prefill workers from which a decode worker cannot pull KV, with the reason, as its newest load record says."""
    load = decode.load
    return {path.worker_id: path.reason for path in load.failing_kv_paths} if load is not None else {}


def make_bad_pairs(
    prefills: Sequence[Target],
    decodes: Sequence[Target],
    factors: SlowFactors,
    *,
    distances_to: Callable[[int], Positions],
) -> BadPairs | None:
    """Returns the bad pairs of a group's candidates. None: there is none.

    `distances_to` gives the distance of each prefill candidate to the decode candidate at a position.
    """
    rows: dict[str, list[int]] = {}
    for row, target in enumerate(prefills):
        rows.setdefault(target.worker.worker_id, []).append(row)
    bad: dict[int, tuple[set[str], Mapping[str, float]]] = {}
    for position, decode in enumerate(decodes):
        failing, slow = failing_paths(decode).keys() & rows.keys(), factors.get(decode.worker.worker_id, {})
        if failing or not rows.keys().isdisjoint(slow):
            bad[position] = (failing, slow)
    if not bad:
        return None
    is_failing = np.zeros((len(prefills), len(bad)), dtype=np.bool_)
    times = np.ones((len(prefills), len(bad)))
    for column, (failing, slow) in enumerate(bad.values()):
        for worker_id in failing:
            is_failing[rows[worker_id], column] = True
        for worker_id, factor in slow.items():
            times[rows.get(worker_id, []), column] = factor
    return BadPairs(
        column_of={position: column for column, position in enumerate(bad)},
        decodes=np.array(list(bad), dtype=np.intp),
        is_failing=is_failing,
        factors=times,
        distances=np.stack([distances_to(position) for position in bad], axis=1),
    )
