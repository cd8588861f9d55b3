"""How fast a worker is and how much it holds, and how long the prompts of a load take by where they are computed. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvmesh.core import PerformanceProfile

HIT_RATE_MAX = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A step takes `step_s`. The defaults are close to one H100 with a model of 30 billion parameters.

    `kv_tokens` is the KV capacity of a decode worker, `running_max` its largest batch, `step_tokens_max` the largest step.
    """

    prefill_base_s: float = 0.008
    prefill_s_per_token: float = 1e-4
    prefill_s_per_token_pair: float = 0.0
    decode_step_base_s: float = 0.008
    decode_s_per_request: float = 2e-4
    decode_s_per_kv_token: float = 0.0
    kv_bytes_per_token: int = 131_072
    transfer_bytes_per_s: float = 12.5e9
    kv_tokens: int = 768_000
    running_max: int = 256
    step_tokens_max: int = 8192

    def step_s(self, prefill_tokens: int, decode_requests: int, kv_tokens: float = 0.0) -> float:
        """Time of a step with prompt tokens and decoding requests that hold `kv_tokens` tokens."""
        base_s = self.prefill_base_s if prefill_tokens and not decode_requests else self.decode_step_base_s
        decode_s = self.decode_s_per_request * decode_requests + self.decode_s_per_kv_token * kv_tokens
        return base_s + self.prefill_s_per_token * prefill_tokens + decode_s

    def prefill_s(self, uncached_tokens: float, prompt_tokens: float) -> float:
        """Time to compute the uncached end of a prompt, alone on a worker. Long prompts take several steps."""
        steps = max(1.0, uncached_tokens / self.step_tokens_max)
        return steps * self.prefill_base_s + self.compute_s(
            uncached_tokens=uncached_tokens, prompt_tokens=prompt_tokens
        )

    def compute_s(self, uncached_tokens: float, prompt_tokens: float) -> float:
        """Returns the part of `prefill_s` that grows with the tokens."""
        # Each token attends to those before it: the sum over the last `uncached_tokens` of `prompt_tokens`.
        pairs = uncached_tokens * (prompt_tokens - uncached_tokens / 2)
        return self.prefill_s_per_token * uncached_tokens + self.prefill_s_per_token_pair * pairs

    def decode_s(self, batch: float, context_tokens: float) -> float:
        """Time of a decode step of a batch whose requests hold `context_tokens` tokens each."""
        per_request_s = self.decode_s_per_request + self.decode_s_per_kv_token * context_tokens
        return self.decode_step_base_s + per_request_s * batch

    def transfer_s(self, prompt_tokens: float) -> float:
        """Time to move the KV of a prompt from a prefill to a decode worker."""
        return prompt_tokens * self.kv_bytes_per_token / self.transfer_bytes_per_s


REQUIRED = ("prefill_s_per_token", "decode_step_base_s", "decode_s_per_request")
"""Coefficients without which nothing can be sized."""


def speed_of(profile: PerformanceProfile, *, kv_tokens: int = 0, running_max: int = 0) -> Speed | Sequence[str]:
    """Returns a worker's speed, or the required coefficients that its profile lacks. 0: the default capacity."""
    if missing := [name for name in REQUIRED if getattr(profile, name) is None]:
        return missing
    names = [name for name in PerformanceProfile.__dataclass_fields__ if name in Speed.__dataclass_fields__]
    known = {name: value for name in names if (value := getattr(profile, name)) is not None}
    # Without a measured base, a prefill step has that of a decode step.
    known.setdefault("prefill_base_s", profile.decode_step_base_s)
    capacity = {"kv_tokens": kv_tokens, "running_max": running_max}
    return Speed(**known, **{name: value for name, value in capacity.items() if value})


def profile_of(speed: Speed) -> PerformanceProfile:
    """Returns the coefficients as workers register them. Capacities are not part of it."""
    names = [name for name in PerformanceProfile.__dataclass_fields__ if name in Speed.__dataclass_fields__]
    return PerformanceProfile(**{name: getattr(speed, name) for name in names})


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
        """Returns the same prompts, each `saved_s` faster."""
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
