"""Settings of the simulated engine, and how long its steps take."""

import sys
from dataclasses import dataclass, field

from kvmesh.core import PerformanceProfile
from kvmesh.errors import InvalidRequestError
from kvmesh.settings import internal

PREFILL_TOKENS_MIN = 16
"""Prompt tokens that a step computes however short its time budget is, so that prompts always advance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Step time in seconds: `base_s + per_prefill_token_s * prompt tokens + per_decode_request_s * decoding requests`."""

    base_s: float = 0.004
    per_prefill_token_s: float = 0.00004
    per_decode_request_s: float = 0.00002

    def step_s(self, prefill_tokens: int, decode_requests: int) -> float:
        """Time of a step that computes so many prompt tokens and decodes for so many requests."""
        return self.base_s + self.per_prefill_token_s * prefill_tokens + self.per_decode_request_s * decode_requests

    def prefill_tokens_within(self, step_s: float, decode_requests: int) -> int:
        """Prompt tokens that fit into a step of so many seconds beside the decoding ones; at least PREFILL_TOKENS_MIN."""
        if not self.per_prefill_token_s:
            return sys.maxsize
        return max(PREFILL_TOKENS_MIN, int((step_s - self.step_s(0, decode_requests)) / self.per_prefill_token_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """What a simulated engine is made of. Times in seconds, sizes in the unit of their name."""

    model: str = "demo"
    """Served model name."""
    model_dir: str = ""
    """Hugging Face model directory for the card (config.json, tokenizer.json); empty: the values below alone."""
    revision: str = ""
    """Model revision, part of the compatibility hash."""
    context_tokens_max: int = 0
    """Context length; 0: the model directory's, or 8192 without one. Never more than the blocks hold."""
    vocabulary_size: int = 0
    """Token ids are below it; 0: the model directory's, or 32000 without one."""
    eos_token_id: int = -1
    """End-of-sequence id; -1: the model directory's, or 2 without one."""
    first_token_id: int = -1
    """Smallest id the engine generates; -1: the widest run of ids without special tokens is taken."""
    token_span: int = 0
    """How many ids from `first_token_id` on are generated; 0: all of that run."""
    eos_after_tokens: int = 0
    """An answer's eos comes as this token of it, unless the request ignores eos; 0: never."""
    block_size_tokens: int = 16
    """Tokens per KV block."""
    kv_blocks: int = 16384
    """Blocks in the pool."""
    kv_bytes_per_block: int = 1024
    """Real memory per block, a multiple of 8, at least 32. The pool is `kv_blocks` times this."""
    step_tokens_max: int = 8192
    """Token budget of a step: one per decoding request, the rest for prompts."""
    step_budget_s: float = 0.2
    """Time that a step should stay within: long prompts are computed in parts that fit, so that a cancel takes effect soon and
    other answers go on. 0: no limit."""
    decode_tokens_per_step: int = 1
    """Tokens each decoding request gains in a step (more: as with speculative decoding)."""
    running_requests_max: int = 256
    """Requests that run at once."""
    waiting_requests_max: int = 1024
    """Requests that wait; beyond it submissions are refused as overloaded."""
    output_buffer_steps: int = internal(64, "Step outputs the consumer may lag behind before the engine pauses.")
    kv_event_buffer_blocks: int = internal(
        65536, "Block changes kept for a slow reader of KV events; beyond it they are replaced by a snapshot."
    )
    lease_s: float = 30.0
    """How long handed-out blocks are held."""
    pull_timeout_s: float = 10.0
    """A pull that takes longer is abandoned and the prompt computed."""
    adapters: tuple[str, ...] = ()
    """Adapters loaded from the start."""
    verify_kv: bool = internal(
        True, "Checks guards and checksum after a pull. False shows what an engine without them would answer."
    )
    kv_transport: str = "nixl"
    """How KV moves: `nixl`, or `none`: each engine serves alone."""
    kv_transport_delay_s: float = 0.0
    """A decode engine waits this long after its start before it loads the transport."""
    profile: StepProfile = field(default_factory=StepProfile)
    """Step times."""
    time_factor: float = 1.0
    """Scale of all step times: 1 is real time, 0 as fast as possible (never sleeps)."""
    seed: int = 0
    """Seed of injected faults."""
    role: str = "decode"
    """Pool at the start: `prefill` or `decode`."""

    def __post_init__(self) -> None:
        problems = [text for bad, text in self._checks() if bad]
        if problems:
            raise InvalidRequestError("; ".join(problems), field="simulated", reason="invalid_settings")

    def prefill_tokens_max(self, decode_requests: int) -> int:
        """Prompt tokens of a step that also decodes for so many requests, by its token and its time budget."""
        tokens_max = self.step_tokens_max - decode_requests
        if self.step_budget_s and self.time_factor:
            budget_s = self.step_budget_s / self.time_factor
            return min(tokens_max, self.profile.prefill_tokens_within(budget_s, decode_requests))
        return tokens_max

    def performance(self) -> PerformanceProfile | None:
        """The step times that are registered with routers. None when steps take no time."""
        if not self.time_factor:
            return None
        profile, factor = self.profile, self.time_factor
        return PerformanceProfile(
            prefill_base_s=factor * profile.base_s,
            prefill_s_per_token=factor * profile.per_prefill_token_s,
            prefill_s_per_token_pair=0.0,
            decode_step_base_s=factor * profile.base_s,
            decode_s_per_request=factor * profile.per_decode_request_s,
            decode_s_per_kv_token=0.0,
            kv_bytes_per_token=max(1, self.kv_bytes_per_block // self.block_size_tokens),
        )

    def _checks(self) -> list[tuple[bool, str]]:
        counts = [
            "block_size_tokens",
            "kv_blocks",
            "step_tokens_max",
            "decode_tokens_per_step",
            "running_requests_max",
            "waiting_requests_max",
            "output_buffer_steps",
            "kv_event_buffer_blocks",
        ]
        return [
            *((getattr(self, name) < 1, f"{name} must be at least 1") for name in counts),
            (self.kv_bytes_per_block < 32 or self.kv_bytes_per_block % 8 != 0, "kv_bytes_per_block: 32 up, by 8"),
            (self.step_budget_s < 0, "step_budget_s must be at least 0"),
            (self.lease_s <= 0, "lease_s must be above 0"),
            (self.pull_timeout_s <= 0, "pull_timeout_s must be above 0"),
            (self.time_factor < 0, "time_factor must be at least 0"),
            (self.kv_transport not in ("nixl", "none"), "kv_transport must be nixl or none"),
            (self.role not in ("prefill", "decode"), "role must be prefill or decode"),
            (self.step_tokens_max < self.running_requests_max, "step_tokens_max must cover running_requests_max"),
        ]
