"""Settings of the simulated engine, and how long its steps take."""

import sys
from dataclasses import dataclass, field

from kvmesh.core import PerformanceProfile
from kvmesh.errors import InvalidRequestError
from kvmesh.settings import internal, setting

PREFILL_TOKENS_MIN = 16
"""Prompt tokens that every step may compute, whatever its time budget, so that prompts always advance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Step time in seconds: `base_s` and the products of the other coefficients with what the step computes."""

    base_s: float = setting(0.004, "Fixed part of a step.", min=0)
    per_prefill_token_s: float = setting(0.00004, "Time for each prompt token of a step.", min=0)
    per_decode_request_s: float = setting(0.00002, "Time for each request that decodes in a step.", min=0)
    per_prompt_s: float = setting(0.0, "Time for each prompt of which tokens are computed in a step.", min=0)
    per_prefill_step_s: float = setting(0.0, "Time on top of a step that computes prompt tokens.", min=0)
    per_token_pair_s: float = setting(
        0.0, "Time for each pair of a computed prompt token and a token before it: attention.", min=0
    )

    def step_s(self, prefill_tokens: int, decode_requests: int, *, prompts: int = 0, token_pairs: float = 0.0) -> float:
        return (
            self.base_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_decode_request_s * decode_requests
            + self.per_prompt_s * prompts
            + (self.per_prefill_step_s if prefill_tokens else 0.0)
            + self.per_token_pair_s * token_pairs
        )

    def prefill_tokens_within(self, step_s: float, decode_requests: int) -> int:
        """Prompt tokens that fit into a step of `step_s` that also decodes for these requests; at least PREFILL_TOKENS_MIN."""
        if not self.per_prefill_token_s:
            return sys.maxsize
        left_s = step_s - self.step_s(prefill_tokens=0, decode_requests=decode_requests) - self.per_prefill_step_s
        return max(PREFILL_TOKENS_MIN, int(left_s / self.per_prefill_token_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """Settings of one simulated engine.

    `model` is the served name. `model_dir` is a Hugging Face model directory (config.json, tokenizer.json); empty: the settings below
    alone. `role` is the pool at the start, `prefill` or `decode`. A pull that takes longer than `pull_timeout_s` is abandoned and the
    prompt computed.
    """

    model: str = "demo"
    data_parallel_rank: int = 0
    model_dir: str = setting(
        "", "Hugging Face model directory (config.json, tokenizer.json); empty: the values below alone."
    )
    revision: str = internal("", "Model revision, part of the compatibility hash.")
    context_tokens_max: int = setting(
        0, "Context length; 0: the model directory's, or 8192 without one. Never more than the blocks hold.", min=0
    )
    vocabulary_size: int = internal(0, "Token ids are below it; 0: the model directory's, or 32000 without one.")
    eos_token_id: int = internal(-1, "End-of-sequence id; -1: the model directory's, or 2 without one.")
    eos_after_tokens: int = setting(
        0, "An answer ends with eos as this token, unless the request ignores eos; 0: never.", min=0
    )
    block_size_tokens: int = setting(16, "Tokens per KV block.", min=1)
    data_parallel_size: int = setting(
        1, "Data-parallel ranks of a worker: engines with a pool and a queue of their own.", min=1, max=64
    )
    kv_blocks: int = setting(16384, "Blocks in the pool of each rank.", min=1)
    kv_bytes_per_block: int = setting(
        1024, "Real memory per block, a multiple of 8. The pool is `kv_blocks` times this.", min=32
    )
    step_tokens_max: int = setting(
        8192,
        "Token budget of a step: one per decoding request, the rest for prompts. At least `running_requests_max`.",
        min=1,
    )
    step_budget_s: float = internal(
        0.2,
        "Target for the longest step. Long prompts are computed in parts that fit, so that cancels take effect soon and other"
        " answers go on. 0: no limit.",
    )
    decode_tokens_per_step: int = setting(
        1, "Tokens that each decoding request gains in a step (more than 1: as with speculative decoding).", min=1
    )
    running_requests_max: int = setting(256, "Requests that run at once.", min=1)
    waiting_requests_max: int = 1024
    output_buffer_steps: int = internal(64, "Step outputs that the consumer may lag behind before the engine pauses.")
    kv_event_buffer_blocks: int = internal(
        65536, "Block changes kept for a slow reader of KV events; a snapshot replaces them when there are more."
    )
    lease_s: float = 30.0
    pull_timeout_s: float = 10.0
    adapters: tuple[str, ...] = internal((), "Adapters that are loaded at the start.")
    verify_kv: bool = internal(
        True, "Checks guards and checksum after a pull. False shows what an engine without them would answer."
    )
    kv_transport: str = setting(
        "nixl",
        "Transport of KV blocks; `none`: each engine serves alone; `fake`: a rendezvous that moves no KV, for warm-up and tests, which"
        " refuses requests of clients.",
        choices=("nixl", "none", "fake"),
    )
    handoff: str = setting(
        "sequential",
        "How prefill and decode meet: `sequential` as vLLM (decode pulls after prefill), `rendezvous` as SGLang (both start at once).",
        choices=("sequential", "rendezvous"),
    )
    handshake_timeout_s: float = internal(
        4.0, "Rendezvous: how long a leg waits for its counterpart to appear before it fails."
    )
    reserved_output_tokens: int = internal(
        512,
        "Rendezvous: output tokens for which a decode worker reserves KV blocks before it takes a request, as SGLang.",
    )
    kv_transport_delay_s: float = setting(
        0.0, "Delay from the start of a decode engine until it loads the transport.", min=0
    )
    kv_transfer_pause_s: float = setting(
        0.0, "Pause in the middle of each transfer of KV, so that faults and cancels can meet one. 0: none.", min=0
    )
    profile: StepProfile = field(default_factory=StepProfile)
    event_loop: str = setting(
        "normal",
        "`normal`: the next step begins when the results of a step have been processed; `overlap`: it runs meanwhile, as in SGLang, so a"
        " token comes later and the next step earlier.",
        choices=("normal", "overlap"),
    )
    processing_s: float = setting(0.0, "Time to process the results of a step.", min=0)
    time_factor: float = setting(
        1.0, "Scale of all step times: 1 is real time, 0 as fast as possible (never sleeps).", min=0
    )
    role: str = "decode"

    def __post_init__(self) -> None:
        if self.kv_bytes_per_block < 32 or self.kv_bytes_per_block % 8:
            raise InvalidRequestError(
                "kv_bytes_per_block must be a multiple of 8, at least 32", field="kv_bytes_per_block"
            )
        if self.step_tokens_max < self.running_requests_max:
            raise InvalidRequestError("step_tokens_max must cover running_requests_max", field="step_tokens_max")

    def prefill_tokens_max(self, decode_requests: int) -> int:
        """Returns the most prompt tokens of a step that also decodes for these requests, by its token and time budgets."""
        tokens_max = self.step_tokens_max - decode_requests
        if self.step_budget_s and self.time_factor:
            budget_s = self.step_budget_s / self.time_factor
            return min(tokens_max, self.profile.prefill_tokens_within(budget_s, decode_requests))
        return tokens_max

    def step_s(self, prefill_tokens: int, decode_requests: int, *, prompts: int = 0, token_pairs: float = 0.0) -> float:
        """Returns the seconds from the begin of a step to the begin of the next one, before `time_factor`."""
        computing_s = self.profile.step_s(
            prefill_tokens=prefill_tokens, decode_requests=decode_requests, prompts=prompts, token_pairs=token_pairs
        )
        if self.event_loop == "overlap":
            return max(computing_s, self.processing_s)
        return computing_s + self.processing_s

    def performance(self) -> PerformanceProfile | None:
        """Returns the step times to register with routers. None when steps take no time."""
        if not self.time_factor:
            return None
        profile, factor = self.profile, self.time_factor
        return PerformanceProfile(
            prefill_base_s=factor
            * (profile.base_s + profile.per_prompt_s + profile.per_prefill_step_s + self.processing_s),
            prefill_s_per_token=factor * profile.per_prefill_token_s,
            prefill_s_per_token_pair=factor * profile.per_token_pair_s,
            decode_step_base_s=factor * self.step_s(prefill_tokens=0, decode_requests=0),
            decode_s_per_request=factor * profile.per_decode_request_s,
            decode_s_per_kv_token=0.0,
            kv_bytes_per_token=max(1, self.kv_bytes_per_block // self.block_size_tokens),
        )
