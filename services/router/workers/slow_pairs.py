"""Pairs of workers whose handoffs take longer than those of other pairs at the same distance. Pure; times are arguments.

A bad link between two hosts slows one pair, while `HandoffEstimator` knows distances only. The factor of a pair is learned from its own
handoffs, as an exponential average of the logarithm of observed over expected time. It halves in `HALF_LIFE_S` without handoffs, so
a pair that is avoided is tried again.

Invariants: 1. at most `PAIRS_MAX` pairs, and only such that were slow; 2. a factor is above `FACTOR_MIN`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log

FACTOR_MIN = 2.0
"""Times vary: a pair that takes less is as fast as the others."""
FACTOR_MAX = 1000.0
EXCESS_MIN_S = 0.005
"""A delay up to this much longer than expected is too small to matter."""
GAIN = 0.3
OBSERVATIONS_MIN = 2
"""One slow handoff may have waited for something else."""
HALF_LIFE_S = 20.0
PAIRS_MAX = 1024
REFRESH_S = 0.25
"""Factors that decisions use are as old as this at most."""
_FORGOTTEN = 0.1
"""Logarithm of a factor that is as good as 1."""


@dataclass(slots=True, eq=False)
class _SlowPair:
    log_factor: float
    updated_at: float
    observations: int = 0

    def decayed(self, now: float) -> float:
        return self.log_factor * exp(-log(2) * max(0.0, now - self.updated_at) / HALF_LIFE_S)


class SlowPairs:
    """The slow pairs, by prefill and decode worker."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], _SlowPair] = {}
        self._refresh_at = 0.0
        self.version = 0
        """Changes when `factors` changes."""
        self.factors: Mapping[str, Mapping[str, float]] = {}
        """How many times longer than expected a handoff takes, by the ids of the decode and the prefill worker."""

    def __len__(self) -> int:
        return len(self._pairs)

    def learn(self, prefill_id: str, decode_id: str, *, expected_s: float, observed_s: float, now: float) -> None:
        """Takes the time of one handoff."""
        key = (prefill_id, decode_id)
        pair = self._pairs.get(key)
        # The last comparison also guards the division below.
        is_slow = observed_s > expected_s + EXCESS_MIN_S and observed_s > FACTOR_MIN * expected_s > 0
        if pair is None:
            if not is_slow or len(self._pairs) >= PAIRS_MAX:
                return
            pair = self._pairs[key] = _SlowPair(log_factor=0.0, updated_at=now)
        observed = log(min(FACTOR_MAX, observed_s / expected_s)) if is_slow else 0.0
        before = pair.decayed(now)
        pair.log_factor, pair.updated_at = before + GAIN * (observed - before), now
        pair.observations += 1

    def advance(self, now: float) -> None:
        """Brings `factors` up to date. To be called before they are used."""
        if not self._pairs or now < self._refresh_at:
            return
        self._refresh_at = now + REFRESH_S
        self.version += 1
        factors: dict[str, dict[str, float]] = {}
        for (prefill_id, decode_id), pair in list(self._pairs.items()):
            decayed = pair.decayed(now)
            if decayed < _FORGOTTEN:
                del self._pairs[prefill_id, decode_id]
            elif decayed > log(FACTOR_MIN) and pair.observations >= OBSERVATIONS_MIN:
                factors.setdefault(decode_id, {})[prefill_id] = exp(decayed)
        self.factors = factors
