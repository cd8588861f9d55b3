"""How long the prompts of a load take, by where they are computed. Pure; the result is shared by all pools and rates that are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from services.planner.sizing.speed import Speed

HIT_RATE_MAX = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTimes:
    """Prompts of one pool. `share`: of all requests. `mean_s` and `square_s2`: first two moments of their computing times."""

    share: float = 0.0
    mean_s: float = 0.0
    square_s2: float = 0.0

    @property
    def cv2(self) -> float:
        """Squared coefficient of variation."""
        return max(0.0, self.square_s2 / (self.mean_s * self.mean_s) - 1.0) if self.mean_s else 0.0

    def less(self, saved_s: float) -> "PoolTimes":
        """The same prompts, each `saved_s` faster."""
        square_s2 = self.square_s2 - 2 * saved_s * self.mean_s + saved_s * saved_s
        return PoolTimes(share=self.share, mean_s=self.mean_s - saved_s, square_s2=square_s2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTimes:
    """`own_s`: (share of the requests, whether decode workers compute it, time until its first token without waiting and decode steps)."""

    prefill: PoolTimes
    deflected: PoolTimes
    own_s: Sequence[tuple[float, bool, float]]


def uncached_tokens(tokens: float, hit_rate: float) -> float:
    return max(1.0, tokens * (1.0 - min(HIT_RATE_MAX, hit_rate)))


@lru_cache(maxsize=512)
def prompt_times(
    speed: Speed, lengths: tuple[tuple[float, float], ...], *, hit_rate: float, deflect_tokens: float
) -> PromptTimes:
    """`lengths`: (tokens, share). Prompts of up to `deflect_tokens` uncached tokens are deflected; infinite: all."""
    prefill: list[tuple[float, float]] = []
    deflected: list[tuple[float, float]] = []
    own: list[tuple[float, bool, float]] = []
    for tokens, part in lengths:
        uncached = uncached_tokens(tokens, hit_rate=hit_rate)
        if uncached <= deflect_tokens:
            time_s = speed.compute_s(uncached_tokens=uncached, prompt_tokens=tokens)
            deflected.append((time_s, part))
            own.append((part, True, time_s))
        else:
            time_s = speed.prefill_s(uncached, tokens)
            prefill.append((time_s, part))
            own.append((part, False, time_s + speed.transfer_s(tokens)))
    return PromptTimes(prefill=_pool(prefill), deflected=_pool(deflected), own_s=tuple(own))


def _pool(times: Sequence[tuple[float, float]]) -> PoolTimes:
    share = sum(part for _, part in times)
    if not share:
        return PoolTimes()
    return PoolTimes(
        share=share,
        mean_s=sum(time_s * part for time_s, part in times) / share,
        square_s2=sum(time_s * time_s * part for time_s, part in times) / share,
    )
