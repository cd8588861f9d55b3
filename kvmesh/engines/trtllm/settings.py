"""Settings of the TensorRT-LLM engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import InvalidRequestError
from kvmesh.settings import setting

LEASE_MARGIN_S = 2.0
GENERATION_FIRST = "generation_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmSettings:
    """Settings of one TensorRT-LLM engine. 0 or empty means the engine's or the model's value unless a field says otherwise.

    `model` is a directory or a hub name; `served_name` is the name in the mesh, empty: `model`. `role` is `prefill` or `decode`.
    `kv_transfer_timeout_ms` is `lease_s` on a prefill engine, which frees blocks that are never pulled only by this timeout, and
    `pull_timeout_s` on a decode engine.
    """

    model: str
    served_name: str = ""
    revision: str = setting("", "Model revision, part of the compatibility hash.")
    role: str = "decode"
    dtype: str = setting("auto", "Type of weights and activations.")
    block_size_tokens: int = setting(32, "Tokens per KV block (`kv_cache_config.tokens_per_block`).", min=1)
    gpu_memory_fraction: float = setting(0.9, "Share of the free GPU memory that the KV cache takes.", min=0.01, max=1)
    kv_cache_tokens: int = setting(0, "Most tokens in the KV cache; 0: what `gpu_memory_fraction` gives.", min=0)
    context_tokens_max: int = setting(0, "Context length; 0: the model's.", min=0)
    running_requests_max: int = setting(256, "Requests that run at once (`max_batch_size`).", min=1)
    waiting_requests_max: int = 1024
    step_tokens_max: int = setting(0, "Most tokens of a step (`max_num_tokens`); 0: the engine's default, 8192.", min=0)
    tensor_parallel_size: int = setting(1, "Tensor-parallel ranks. The engine starts them over MPI.", min=1)
    pipeline_parallel_size: int = setting(1, "Pipeline-parallel ranks.", min=1)
    expert_parallel_size: int = setting(0, "Expert-parallel ranks of MoE layers; 0: the engine's default.", min=0)
    gpus_per_node: int = setting(
        0,
        "GPUs of each node. Ranks on several nodes are started with mpirun and trtllm-llmapi-launch; only rank 0 is a worker.",
        min=0,
    )
    device_ids: tuple[str, ...] = setting(
        (),
        "GPUs of this engine, one for each rank: positions or UUIDs, as CUDA_VISIBLE_DEVICES. Empty: all visible ones.",
    )
    orchestrator: str = setting("", "Who starts the ranks; empty: MPI.", choices=("", "rpc", "ray"))
    enable_attention_dp: bool = setting(
        False, "Attention is data-parallel over the tensor-parallel ranks; each rank is a target of its own."
    )
    has_kv_transfer: bool = setting(True, "False starts without a cache transceiver: the engine computes every prompt.")
    transfer_backend: str = setting(
        "NIXL",
        "Library that moves KV blocks. It is always named, since the engine's own default differs between its releases.",
        choices=("NIXL", "UCX", "MOONCAKE", "MPI"),
    )
    transceiver_runtime: str = setting(
        "", "Implementation of the transceiver; empty: the engine's default.", choices=("", "CPP", "PYTHON", "auto")
    )
    schedule_style: str = setting(
        "context_first",
        "`context_first`: the decode leg starts after the prefill leg. `generation_first`: both start at once and meet by a room.",
        choices=("context_first", GENERATION_FIRST),
    )
    kv_events: str = setting(
        "pull",
        "`pull`: the adapter asks for KV events. `push`: the engine publishes them over ZMQ (KV cache manager V2). `off`: none.",
        choices=("pull", "push", "off"),
    )
    kv_events_endpoint: str = setting(
        "tcp://127.0.0.1:5557",
        "With `push`: where the engine publishes; each data-parallel rank adds its number to the port.",
    )
    guided_backend: str = setting(
        "xgrammar", "Grammar library for structured output.", choices=("xgrammar", "llguidance")
    )
    tokenizer: str = setting(
        "auto",
        "`load`: the engine reads the tokenizer, which structured output needs; `skip`: it does not; `auto`: if the directory has one.",
        choices=("auto", "load", "skip"),
    )
    lease_s: float = 30.0
    pull_timeout_s: float = 10.0
    enable_lora: bool = setting(False, "Allows LoRA adapters.")
    adapters_max: int = setting(8, "Adapters that may be loaded.", min=1)
    adapters_running_max: int = setting(4, "Adapters in GPU memory.", min=1)
    adapter_rank_max: int = setting(16, "Largest LoRA rank.", min=1)
    adapter_modules: tuple[str, ...] = setting(
        ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h"),
        "Modules that adapters may change, by the engine's names (`lora_config.lora_target_modules`).",
    )
    start_timeout_s: float = setting(7200.0, "Longest start, a download of the model included.", min=1)
    engine_arguments: Mapping[str, Any] = setting(
        {},
        "Further arguments of tensorrt_llm.LLM by name; mappings are merged. Those that kvmesh sets itself are refused.",
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidRequestError("model must be given", field="model")
        if not 0 < self.pull_timeout_s < self.lease_s:
            raise InvalidRequestError("pull_timeout_s must be above 0 and below lease_s", field="pull_timeout_s")

    @property
    def kv_timeout_s(self) -> float:
        """The engine's `kv_transfer_timeout_ms` in this role."""
        return self.lease_s if self.role == "prefill" else self.pull_timeout_s

    @property
    def lease_margin_s(self) -> float:
        """A handle with less time left than this is not pulled."""
        return min(LEASE_MARGIN_S, self.lease_s / 4)

    @property
    def is_generation_first(self) -> bool:
        return self.has_kv_transfer and self.schedule_style == GENERATION_FIRST

    @property
    def data_parallel_size(self) -> int:
        return self.tensor_parallel_size if self.enable_attention_dp else 1
