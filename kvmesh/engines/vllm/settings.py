"""Settings of the vLLM engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.engines.nodes import check_nodes, node_rank_setting, nodes_address_setting, nodes_setting
from kvmesh.errors import InvalidRequestError
from kvmesh.settings import internal, setting

CPU_BLOCK_SIZE_TOKENS = 32
CPU_KV_CACHE_BYTES = 128 << 20
CPU_STEP_BUDGET_S = 0.2
CPU_RUNNING_REQUESTS = 64
LEASE_MARGIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of one vLLM engine. 0 or empty means vLLM's or the model's value unless a field says otherwise.

    `model` is a directory or a hub name. Both ends of a handoff must give the same string: vLLM's NIXL handshake compares it.
    `served_name` is the name in the mesh; empty: `model`. `role` is the pool at the start, `prefill` or `decode`. vLLM renews a lease of
    `lease_s` while the decode side has the request queued. A pull that takes longer than `pull_timeout_s` is abandoned and the prompt
    computed; vLLM itself would wait forever for a hung peer.
    """

    model: str
    served_name: str = ""
    revision: str = setting("", "Model revision, part of the compatibility hash.")
    role: str = "decode"
    can_switch_role: bool = setting(
        True, "Starts the connector for both roles, so that `set_role` works; False gives vLLM the one role only."
    )
    runner: str = setting(
        "auto", "What the model does: `generate`, `pooling` (embeddings), or `auto`: as its files say."
    )
    dtype: str = setting("auto", "Type of weights and activations.")
    block_size_tokens: int = setting(
        0, "Tokens per KV block; 0: 32 on CPU (where it must be a multiple of 32), vLLM's default on a GPU (16).", min=0
    )
    kv_cache_bytes: int = setting(
        0, "KV memory; 0: 128 MiB on CPU, what is left of `gpu_memory_fraction` on a GPU.", min=0
    )
    gpu_memory_fraction: float = setting(
        0.9, "Share of a GPU's memory that vLLM may take. Not used on CPU.", min=0.01, max=1
    )
    context_tokens_max: int = setting(
        0, "Context length; 0: the model's, shortened to what the KV memory holds.", min=0
    )
    running_requests_max: int = setting(
        0,
        "Requests that run at once; 0: 64 on CPU, the default of vLLM's own server on a GPU (1024 on an H100).",
        min=0,
    )
    waiting_requests_max: int = 1024
    step_tokens_max: int = setting(0, "Most tokens of a step; 0: vLLM's default.", min=0)
    step_budget_s: float | None = setting(
        None,
        "Target for the longest step. Long prompts are computed in parts that fit, so that cancels take effect soon and other"
        " answers go on. The size of the parts is learned from the steps. 0: no limit; empty: 0.2 on CPU, no limit on a GPU.",
        min=0,
    )
    enforce_eager: bool | None = setting(
        None, "No torch.compile and no CUDA graphs; empty: true on CPU (compiling costs 30 s there), false on a GPU."
    )
    device_ids: tuple[str, ...] = setting(
        (),
        "GPUs of this engine, one for each rank: positions among the visible devices, or UUIDs. Empty: the first ones. The others"
        " stay visible, since NIXL needs them to copy from GPU to GPU.",
    )
    tensor_parallel_size: int = setting(
        1, "Ranks. Above 1 the ranks are child processes that die with this one.", min=1
    )
    nodes: int = nodes_setting()
    node_rank: int = node_rank_setting()
    nodes_address: str = nodes_address_setting()
    tokenizer: str = setting(
        "auto",
        "`load`: vLLM reads the tokenizer, which structured output needs; `skip`: it does not; `auto`: if the directory has one.",
        choices=("auto", "load", "skip"),
    )
    json_whitespace: bool = setting(
        True,
        "Constrained JSON may contain whitespace between its parts. Small models may write it without end: False forbids it and"
        " leaves xgrammar as the only grammar backend (schemas that xgrammar does not support are refused then).",
    )
    grammar_cpu_s_max: int = setting(5, "CPU time of compiling one constraint; above it the request is refused.", min=1)
    grammar_wait_s_max: float = internal(
        30.0, "Longest wait for the compilation of one constraint, where the process gets little CPU."
    )
    has_kv_transfer: bool = setting(True, "False starts without a connector: the engine computes every prompt itself.")
    lease_s: float = 30.0
    pull_timeout_s: float = 10.0
    mesh_secret_file: str = ""
    side_channel_host: str = setting(
        "", "Address for the NIXL handshake: the engine listens there, peers connect to it. Empty: that of `address`."
    )
    side_channel_port: int = setting(0, "Port for the NIXL handshake; 0: a free one.", min=0, max=65535)
    enable_lora: bool = setting(False, "Allows LoRA adapters.")
    adapters_max: int = setting(
        8,
        "Adapters that may be loaded. All stay in memory, since vLLM dies when it must reload one whose files are gone.",
        min=1,
    )
    adapters_running_max: int = setting(4, "Adapters in one batch.", min=1)
    adapter_rank_max: int = setting(16, "Largest LoRA rank.", min=1)
    start_timeout_s: float = setting(7200.0, "Longest start, a download of the model included.", min=1)
    log_level: str = setting("WARNING", "vLLM's log level.")
    engine_arguments: Mapping[str, Any] = setting(
        {},
        "Further vLLM EngineArgs by name; they override the values above. Those that kvmesh sets itself are refused.",
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidRequestError("model must be given", field="model")
        if not 0 < self.pull_timeout_s < self.lease_s:
            raise InvalidRequestError("pull_timeout_s must be above 0 and below lease_s", field="pull_timeout_s")
        if self.nodes > 1:
            self._check_nodes()

    def _check_nodes(self) -> None:
        check_nodes(
            nodes=self.nodes,
            node_rank=self.node_rank,
            nodes_address=self.nodes_address,
            ranks=self.tensor_parallel_size,
        )
        if self.has_kv_transfer:
            # The words that prove that blocks are held (holds.py) lie in the leader's memory.
            raise InvalidRequestError(
                "an engine on several nodes cannot hand over KV: set has_kv_transfer to false",
                field="has_kv_transfer",
            )

    @property
    def lease_margin_s(self) -> float:
        """A handle with less time left than this is not pulled, since the NIXL handshake and the pull take time."""
        return min(LEASE_MARGIN_S, self.lease_s / 4)


def check_cpu_block_size(block_size_tokens: int) -> None:
    """vLLM's CPU attention supports multiples of 32 only. vLLM itself reports that late, deep inside its start."""
    if block_size_tokens % CPU_BLOCK_SIZE_TOKENS:
        raise InvalidRequestError(
            f"block_size_tokens must be a multiple of {CPU_BLOCK_SIZE_TOKENS} on CPU, not {block_size_tokens}",
            field="block_size_tokens",
            reason="invalid_settings",
        )
