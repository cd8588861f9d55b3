"""Arguments of `tensorrt_llm.LLM` from the settings. Configurations are mappings, which the engine validates."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvmesh.engines.trtllm.settings import TrtllmSettings
from kvmesh.errors import InvalidRequestError

STREAMS = "the adapter reads every step of every request"
OWN: Mapping[str, str] = {
    "model": "it comes from --model",
    "revision": "use revision, which is part of the compatibility hash",
    "tokenizer": "prompts are token ids; the setting tokenizer says whether the engine loads one",
    "skip_tokenizer_init": "use the setting tokenizer",
    "backend": "the adapter is written for the PyTorch backend",
    "stream_interval": STREAMS,
    "num_postprocess_workers": STREAMS,
    "max_beam_width": "the mesh has no beam search",
    "encode_only": "the adapter serves generating models only",
    "mm_encoder_only": "the adapter serves generating models only",
    "enable_iter_perf_stats": "the load record is made from the statistics",
    "enable_attention_dp": "use enable_attention_dp, which also makes the ranks targets of the router",
    "max_batch_size": "use running_requests_max",
    "max_seq_len": "use context_tokens_max",
    "max_num_tokens": "use step_tokens_max",
    "tensor_parallel_size": "use tensor_parallel_size",
    "pipeline_parallel_size": "use pipeline_parallel_size",
    "enable_lora": "use enable_lora",
    "cache_transceiver_config.backend": "use transfer_backend: both ends of a handoff must have the same one",
    "cache_transceiver_config.kv_transfer_timeout_ms": "it is the lease of the mesh (kv-lease-s, kv-pull-timeout-s)",
    "kv_cache_config.tokens_per_block": "use block_size_tokens, which is part of the compatibility hash",
    "kv_cache_config.enable_block_reuse": "the router places requests by cached blocks",
    "kv_cache_config.kv_events_config": "use kv_events and kv_events_endpoint",
    "scheduler_config.waiting_queue_policy": "requests have priorities",
}
"""Arguments that kvmesh sets itself, and why they cannot be passed through."""
KV_EVENTS_MAX = 65_536
"""KV events that the engine keeps until they are fetched, 20 times a second. `engine_arguments` may set another number."""
LAUNCHED = "TLLM_SPAWN_PROXY_PROCESS"
"""`trtllm-llmapi-launch` sets it to 1 for the command that it runs."""


def engine_arguments(settings: TrtllmSettings) -> dict[str, Any]:
    """Returns all arguments. InvalidRequestError for those that kvmesh sets itself."""
    for name in paths(settings.engine_arguments):
        if name in OWN:
            raise InvalidRequestError(
                f"engine_arguments cannot set {name}: {OWN[name]}", field="engine_arguments", reason="invalid_settings"
            )
    return merge(own_arguments(settings), settings.engine_arguments)


def check_launcher(settings: TrtllmSettings, environ: Mapping[str, str]) -> None:
    """InvalidRequestError for ranks on several machines without TensorRT-LLM's launcher.

    MPI starts a process for each rank. The launcher runs the worker in that of rank 0 and the engine's own loop in the others, and ends all
    together. Without it each of them would be a worker that registers.
    """
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    is_on_several = 0 < settings.gpus_per_node < ranks and not settings.orchestrator
    if is_on_several and environ.get(LAUNCHED) != "1":
        raise InvalidRequestError(
            f"{ranks} ranks need more than one node of {settings.gpus_per_node} GPUs: start the worker with mpirun or srun and"
            " trtllm-llmapi-launch",
            field="gpus_per_node",
            reason="invalid_settings",
        )


def own_arguments(settings: TrtllmSettings) -> dict[str, Any]:
    optional = {
        "revision": settings.revision,
        "max_seq_len": settings.context_tokens_max,
        "max_num_tokens": settings.step_tokens_max,
        "moe_expert_parallel_size": settings.expert_parallel_size,
        "gpus_per_node": settings.gpus_per_node,
        "orchestrator_type": settings.orchestrator,
    }
    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "skip_tokenizer_init": not loads_tokenizer(settings),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "max_batch_size": settings.running_requests_max,
        "enable_attention_dp": settings.enable_attention_dp,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "stream_interval": 1,
        "kv_cache_config": cache_arguments(settings),
        # Without it the engine ignores the priorities of requests.
        "scheduler_config": {"waiting_queue_policy": "priority"},
        **{name: value for name, value in optional.items() if value},
    }
    if loads_tokenizer(settings):
        arguments["guided_decoding_backend"] = settings.guided_backend
    if settings.has_kv_transfer:
        arguments["cache_transceiver_config"] = transceiver_arguments(settings)
    if settings.enable_lora:
        arguments["enable_lora"] = True
        arguments["lora_config"] = {
            "max_lora_rank": settings.adapter_rank_max,
            "max_loras": min(settings.adapters_running_max, settings.adapters_max),
            "max_cpu_loras": settings.adapters_max,
            "lora_target_modules": list(settings.adapter_modules),
        }
    return arguments


def cache_arguments(settings: TrtllmSettings) -> dict[str, Any]:
    values: dict[str, Any] = {
        "enable_block_reuse": True,
        "tokens_per_block": settings.block_size_tokens,
        "free_gpu_memory_fraction": settings.gpu_memory_fraction,
    }
    if settings.kv_cache_tokens:
        values["max_tokens"] = settings.kv_cache_tokens
    if settings.kv_events == "pull":
        values["event_buffer_max_size"] = KV_EVENTS_MAX
    if settings.kv_events == "push":
        values["use_kv_cache_manager_v2"] = True
        values["kv_events_config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": settings.kv_events_endpoint,
        }
    return values


def transceiver_arguments(settings: TrtllmSettings) -> dict[str, Any]:
    """Returns the arguments of the transceiver.

    A prefill engine keeps blocks for the lease; a decode engine abandons a transfer after `pull_timeout_s`.
    """
    values: dict[str, Any] = {
        "backend": settings.transfer_backend,
        "kv_transfer_timeout_ms": max(1, int(settings.kv_timeout_s * 1000)),
    }
    if settings.transceiver_runtime:
        values["transceiver_runtime"] = settings.transceiver_runtime
    return values


def loads_tokenizer(settings: TrtllmSettings) -> bool:
    """Prompts are token ids, so the engine needs a tokenizer for structured output only."""
    if settings.tokenizer != "auto":
        return settings.tokenizer == "load"
    folder = Path(settings.model)
    return not folder.is_dir() or (folder / "tokenizer.json").is_file()


def paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all values, and of the mappings that hold them."""
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{name}.")


def merge(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` over `base`, mappings merged."""
    merged = dict(base)
    for name, value in more.items():
        known = merged.get(name)
        is_deep = isinstance(known, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(known, value) if is_deep and known is not None else value
    return merged
