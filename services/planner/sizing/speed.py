"""How fast a worker is and how much it holds: the linear model that workers register, with every coefficient known."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core import PerformanceProfile


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
        """The part of `prefill_s` that grows with the tokens."""
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
    # Without a measured transfer the KV moves at the speed of a 100 Gb/s network.
    known.setdefault("prefill_base_s", profile.decode_step_base_s)
    capacity = {"kv_tokens": kv_tokens, "running_max": running_max}
    return Speed(**known, **{name: value for name, value in capacity.items() if value})


def profile_of(speed: Speed) -> PerformanceProfile:
    """The coefficients as workers register them. Capacities are not part of it."""
    names = [name for name in PerformanceProfile.__dataclass_fields__ if name in Speed.__dataclass_fields__]
    return PerformanceProfile(**{name: getattr(speed, name) for name in names})
