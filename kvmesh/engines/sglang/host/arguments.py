"""SGLang's ServerArgs from the settings."""

import json
from typing import Any

from kvmesh.engines.sglang.settings import CPU_KV_CACHE_BYTES, CPU_RUNNING_REQUESTS, SglangSettings
from kvmesh.errors import InvalidRequestError

CPU_CHUNK_TOKENS = 256
"""A cancel takes effect after the step that runs. A step of 512 tokens of the demo model takes up to 0.3 s on a busy core."""
SET_BY_KVMESH = {
    "model_path": "kvmesh sets it: --model",
    "served_model_name": "kvmesh sets it: --served-name",
    "disaggregation_mode": "the worker's role decides it",
    "enable_pd_role_switch": "kvmesh sets it: --sglang-can-switch-role",
    "disaggregation_transfer_backend": "kvmesh sets it: --sglang-transfer-backend",
    "disaggregation_bootstrap_port": "kvmesh sets it: --sglang-bootstrap-port",
    "host": "kvmesh sets it: --rpc-advertised-host",
    "port": "no HTTP server is started",
    "grpc_port": "no gRPC server of SGLang's is started",
    "kv_events_config": "kvmesh reads KV events itself",
    "page_size": "kvmesh sets it: --sglang-block-size-tokens",
    "skip_tokenizer_init": "kvmesh sets it: --sglang-tokenizer",
    "enable_priority_scheduling": "requests have priorities",
    "schedule_low_priority_values_first": "a larger priority goes first, as everywhere in the mesh",
    "stream_interval": "every step's tokens are sent",
    "tokenizer_worker_num": "no tokenizer process is started",
    "detokenizer_worker_num": "no detokenizer process is started",
    "dp_size": "kvmesh sets it: --sglang-data-parallel-size",
    "pp_size": "kvmesh starts tensor-parallel ranks only: --sglang-tensor-parallel-size",
    "tp_size": "kvmesh sets it: --sglang-tensor-parallel-size",
    "nnodes": "kvmesh sets it: --sglang-nodes",
    "node_rank": "kvmesh sets it: --sglang-node-rank",
    "dist_init_addr": "kvmesh sets it: --sglang-nodes-address",
    "is_embedding": "kvmesh sets it: --sglang-is-embedding",
    "enable_metrics": "the worker has the metrics",
    "sleep_on_idle": "an idle engine always sleeps",
}
"""ServerArgs that `engine_arguments` may not name, and why."""


def server_arguments(settings: SglangSettings, *, is_cpu: bool, bootstrap_port: int) -> Any:
    """ServerArgs. InvalidRequestError names arguments that are unknown or that kvmesh sets itself."""
    from sglang.srt.server_args import ServerArgs

    check_names(settings, set(ServerArgs.__struct_fields__))
    values = base_arguments(settings, bootstrap_port) | (cpu_arguments(settings) if is_cpu else gpu_arguments(settings))
    if settings.kv_cache_bytes or is_cpu:
        kv_bytes = settings.kv_cache_bytes or CPU_KV_CACHE_BYTES
        values["max_total_tokens"] = whole_blocks(
            kv_bytes // kv_bytes_per_token(settings), block_size_tokens=settings.block_size_tokens
        )
    return ServerArgs(**{**values, **settings.engine_arguments})


def check_names(settings: SglangSettings, known: set[str]) -> None:
    """InvalidRequestError for names in `engine_arguments` that SGLang does not know or kvmesh sets."""
    for name in settings.engine_arguments:
        reason = SET_BY_KVMESH.get(name) or ("" if name in known else "SGLang does not know it")
        if reason:
            raise InvalidRequestError(
                f"engine_arguments must not have {name}: {reason}", field="engine_arguments", reason="invalid_settings"
            )


def base_arguments(settings: SglangSettings, bootstrap_port: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_path": settings.model,
        "served_model_name": settings.served_name or settings.model,
        "revision": settings.revision or None,
        "dtype": settings.dtype,
        "context_length": settings.context_tokens_max or None,
        "page_size": settings.block_size_tokens,
        "tp_size": settings.tensor_parallel_size,
        "host": settings.bootstrap_host,
        "skip_tokenizer_init": not loads_tokenizer(settings),
        "is_embedding": settings.is_embedding,
        "enable_priority_scheduling": True,
        "grammar_backend": "xgrammar",
        "skip_server_warmup": True,
        "log_level": settings.log_level,
        "disaggregation_mode": settings.mode,
        "disaggregation_transfer_backend": settings.transfer_backend,
        "disaggregation_bootstrap_port": bootstrap_port,
        # Without a prefix in the hash, tenants that share tokens would share the hash. Nothing is published: the scheduler takes
        # the events.
        "kv_events_config": json.dumps({"publisher": "null", "format": "dynamo"}),
    }
    if settings.nodes > 1:
        values |= {
            "nnodes": settings.nodes,
            "node_rank": settings.node_rank,
            "dist_init_addr": settings.nodes_address,
        }
    if settings.running_requests_max:
        values["max_running_requests"] = settings.running_requests_max
    if settings.chunk_tokens:
        values["chunked_prefill_size"] = settings.chunk_tokens
    if settings.can_switch_role:
        values["enable_pd_role_switch"] = True
    if "decode" in settings.modes and settings.transfer_backend != "fake":
        # Without it a decode engine keeps nothing, and every turn of a conversation is transferred whole.
        values["disaggregation_decode_enable_radix_cache"] = True
    if settings.enable_lora:
        values |= {
            "enable_lora": True,
            "max_lora_rank": settings.adapter_rank_max,
            "lora_target_modules": ["all"],
            "max_loaded_loras": settings.adapters_max,
            "max_loras_per_batch": min(settings.adapters_running_max, settings.adapters_max),
        }
    return values


def cpu_arguments(settings: SglangSettings) -> dict[str, Any]:
    """Without overlap, since there is no device that computes while Python runs."""
    values: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.1,
        "max_running_requests": settings.running_requests_max or CPU_RUNNING_REQUESTS,
        "chunked_prefill_size": settings.chunk_tokens or CPU_CHUNK_TOKENS,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
    }
    if settings.enable_lora:
        values["lora_backend"] = "torch_native"
    if "decode" in settings.modes:
        # SGLang's default copies retracted requests to pinned memory.
        values["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    return values


def gpu_arguments(settings: SglangSettings) -> dict[str, Any]:
    values: dict[str, Any] = {
        "mem_fraction_static": settings.gpu_memory_fraction,
        "base_gpu_id": settings.device_of(0),
    }
    if settings.honors_seeds:
        values["sampling_backend"] = "pytorch"
    return values


def loads_tokenizer(settings: SglangSettings) -> bool:
    """Prompts are token ids, so SGLang needs a tokenizer for structured output and `min_tokens` only."""
    from pathlib import Path

    if settings.tokenizer != "auto":
        return settings.tokenizer == "load"
    folder = Path(settings.model)
    return not folder.is_dir() or (folder / "tokenizer.json").is_file()


def kv_bytes_per_token(settings: SglangSettings) -> int:
    """KV bytes of one token in all ranks, from the model's configuration."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model, revision=settings.revision or None).get_text_config()
    dtype = settings.dtype if settings.dtype != "auto" else str(getattr(config, "dtype", None) or "bfloat16")
    width = 4 if "float32" in dtype else 2
    # Multi-head latent attention keeps one compressed vector and one rotary key per token and layer, instead of keys and values per head.
    if rank := getattr(config, "kv_lora_rank", None):
        return int(config.num_hidden_layers * (rank + config.qk_rope_head_dim) * width)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * width)


def whole_blocks(tokens: int, block_size_tokens: int) -> int:
    return max(block_size_tokens, tokens // block_size_tokens * block_size_tokens)
