"""Settings of the vLLM engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmesh.errors import InvalidRequestError

CPU_BLOCK_SIZE_TOKENS = 32
CPU_KV_CACHE_BYTES = 128 << 20
CPU_STEP_BUDGET_S = 0.2
CPU_RUNNING_REQUESTS = 64
LEASE_MARGIN_S = 2.0
TOKENIZER_MODES = ("auto", "load", "skip")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What a vLLM engine is made of. 0 or empty means "what vLLM or the model says" unless a field says otherwise."""

    model: str
    """Model directory or hub name. Both ends of a handoff must give the same string: vLLM's NIXL handshake compares it."""
    served_name: str = ""
    """Name in the mesh; empty: `model`."""
    revision: str = ""
    """Model revision, part of the compatibility hash."""
    role: str = "decode"
    """Pool at the start: `prefill` or `decode`."""
    can_switch_role: bool = True
    """Starts the connector for both roles, so that `set_role` works; False gives vLLM the one role only."""
    runner: str = "auto"
    """What the model does: `generate`, `pooling` (embeddings), or `auto`: what its files say."""
    dtype: str = "auto"
    """Weights and activations."""
    block_size_tokens: int = 0
    """Tokens per KV block; 0: 32 on CPU (it must be a multiple of 32 there), vLLM's default on a GPU (16)."""
    kv_cache_bytes: int = 0
    """KV memory; 0: 128 MiB on CPU, what is left of `gpu_memory_fraction` on a GPU."""
    gpu_memory_fraction: float = 0.9
    """Share of a GPU's memory that vLLM may take. Not used on CPU."""
    context_tokens_max: int = 0
    """Context length; 0: the model's, shortened to what the KV memory holds."""
    running_requests_max: int = 0
    """Requests that run at once; 0: 64 on CPU, what vLLM's own server takes on a GPU (1024 on an H100)."""
    waiting_requests_max: int = 1024
    """Requests that wait; beyond it submissions are refused as overloaded."""
    step_tokens_max: int = 0
    """Most tokens of a step; 0: vLLM's default."""
    step_budget_s: float | None = None
    """Time that a step should stay within: long prompts are computed in parts that fit, so that a cancel takes effect soon and
    other answers go on. The parts' size is learned from the steps. 0: no limit; None: 0.2 on CPU, no limit on a GPU."""
    enforce_eager: bool | None = None
    """No torch.compile and no CUDA graphs; None: True on CPU (compiling costs 30 s there), False on a GPU."""
    device_ids: tuple[str, ...] = ()
    """GPUs of this engine, one for each rank: places among the visible devices, or UUIDs. Empty: the first ones. The others stay
    visible, as NIXL needs them to copy from GPU to GPU."""
    tensor_parallel_size: int = 1
    """Ranks. Above 1 the ranks are child processes that die with this one."""
    tokenizer: str = "auto"
    """`load` lets vLLM read the tokenizer, which structured output needs; `skip` not; `auto`: if the directory has one."""
    json_whitespace: bool = True
    """Constrained JSON may hold blanks between its parts, as models like to write it. Small ones write them without end: False
    lets none through, and leaves xgrammar as the only grammar backend (schemas that it lacks are refused then)."""
    has_kv_transfer: bool = True
    """False starts without a connector: such an engine computes every prompt itself."""
    lease_s: float = 30.0
    """How long handed-out blocks are held. vLLM renews it while the decode side has the request queued."""
    pull_timeout_s: float = 10.0
    """A pull that takes longer is abandoned and the prompt computed. vLLM itself waits for ever on a hung peer."""
    side_channel_host: str = "127.0.0.1"
    """Address that peers reach for the NIXL handshake; it listens there."""
    side_channel_port: int = 0
    """Its port; 0: a free one."""
    enable_lora: bool = False
    """Allows LoRA adapters."""
    adapters_max: int = 8
    """Adapters that may be loaded. All stay in memory, since vLLM dies when it must reload one whose files are gone."""
    adapters_running_max: int = 4
    """Adapters in one batch."""
    adapter_rank_max: int = 16
    """Largest LoRA rank."""
    start_timeout_s: float = 7200.0
    """How long a start may take, a download of the model included."""
    log_level: str = "WARNING"
    """vLLM's log level."""
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's EngineArgs by name; they win over everything above."""

    def __post_init__(self) -> None:
        problems = [text for is_bad, text in self._checks() if is_bad]
        if problems:
            raise InvalidRequestError("; ".join(problems), field="vllm", reason="invalid_settings")

    @property
    def lease_margin_s(self) -> float:
        """A handle with less time left than this is not pulled, since the NIXL handshake and the pull take time."""
        return min(LEASE_MARGIN_S, self.lease_s / 4)

    def _checks(self) -> list[tuple[bool, str]]:
        at_least_one = (
            "waiting_requests_max",
            "tensor_parallel_size",
            "adapters_max",
            "adapters_running_max",
            "adapter_rank_max",
        )
        at_least_zero = (
            "running_requests_max",
            "block_size_tokens",
            "kv_cache_bytes",
            "context_tokens_max",
            "step_tokens_max",
        )
        return [
            (not self.model, "model must be given"),
            (self.role not in ("prefill", "decode"), "role must be prefill or decode"),
            (self.tokenizer not in TOKENIZER_MODES, f"tokenizer must be one of {', '.join(TOKENIZER_MODES)}"),
            *((getattr(self, name) < 1, f"{name} must be at least 1") for name in at_least_one),
            *((getattr(self, name) < 0, f"{name} must be at least 0") for name in at_least_zero),
            (self.step_budget_s is not None and self.step_budget_s < 0, "step_budget_s must be at least 0"),
            (not 0 < self.pull_timeout_s < self.lease_s, "pull_timeout_s must be above 0 and below lease_s"),
            (not 0 <= self.side_channel_port < 65536, "side_channel_port must be a port"),
            (not 0 < self.gpu_memory_fraction <= 1, "gpu_memory_fraction must be above 0 and at most 1"),
            (self.start_timeout_s <= 0, "start_timeout_s must be above 0"),
        ]


def check_cpu_block_size(block_size_tokens: int) -> None:
    """vLLM's CPU attention takes multiples of 32 only, and says so deep inside its start."""
    if block_size_tokens % CPU_BLOCK_SIZE_TOKENS:
        raise InvalidRequestError(
            f"block_size_tokens must be a multiple of {CPU_BLOCK_SIZE_TOKENS} on CPU, not {block_size_tokens}",
            field="block_size_tokens",
            reason="invalid_settings",
        )
