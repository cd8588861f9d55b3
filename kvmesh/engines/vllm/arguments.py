"""vLLM's engine arguments from the settings. Imports vllm, so the environment must be set before."""

import dataclasses
from pathlib import Path
from typing import Any

from kvmesh.engines.nodes import meeting_address
from kvmesh.engines.vllm.holds import HOLDS_PATH, SECRET_FILE
from kvmesh.engines.vllm.settings import (
    CPU_BLOCK_SIZE_TOKENS,
    CPU_KV_CACHE_BYTES,
    CPU_RUNNING_REQUESTS,
    VllmSettings,
    check_cpu_block_size,
)
from kvmesh.errors import InvalidRequestError

EXTENSION = "kvmesh.engines.vllm.nixl_worker.KvmeshWorkerExtension"
CONNECTOR_MODULE = "kvmesh.engines.vllm.connector"
REPLICAS = "start one worker for each replica; `enable_expert_parallel` divides experts among tensor-parallel ranks"
SET_BY_KVMESH = {
    "model": "kvmesh sets it: --model",
    "served_model_name": "kvmesh sets it: --served-name",
    "tensor_parallel_size": "kvmesh sets it: --vllm-tensor-parallel-size",
    "nnodes": "kvmesh sets it: --vllm-nodes",
    "node_rank": "kvmesh sets it: --vllm-node-rank",
    "master_addr": "kvmesh sets it: --vllm-nodes-address",
    "master_port": "kvmesh sets it: --vllm-nodes-address",
    "kv_transfer_config": "the worker's role decides it; see --vllm-has-kv-transfer",
    "kv_events_config": "kvmesh reads KV events itself",
    "scheduling_policy": "requests have priorities",
    "worker_extension_cls": "kvmesh extends vLLM's worker",
    "disable_log_stats": "the worker has the metrics",
    "data_parallel_size": REPLICAS,
    "data_parallel_rank": REPLICAS,
    "data_parallel_size_local": REPLICAS,
    "data_parallel_start_rank": REPLICAS,
    "data_parallel_address": REPLICAS,
    "data_parallel_rpc_port": REPLICAS,
    "data_parallel_hybrid_lb": REPLICAS,
    "data_parallel_external_lb": REPLICAS,
}
"""EngineArgs that `engine_arguments` may not name, and why."""
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def engine_arguments(settings: VllmSettings, *, is_cpu: bool, holds_path: str) -> Any:
    """vLLM's EngineArgs. The connector maps its hold table from `holds_path`.

    InvalidRequestError for values that vLLM would refuse late or with an unclear message.
    """
    from vllm.engine.arg_utils import EngineArgs

    values = base_arguments(settings) | (cpu_arguments(settings) if is_cpu else gpu_arguments(settings))
    values |= connector_arguments(settings, holds_path)
    check_names(settings)
    unknown = set(settings.engine_arguments) - {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown:
        raise InvalidRequestError(
            f"engine_arguments has names that vLLM does not know: {', '.join(sorted(unknown))}",
            field="engine_arguments",
            reason="invalid_settings",
        )
    values |= settings.engine_arguments
    if is_cpu:
        check_cpu_block_size(values["block_size"])
    return EngineArgs(**values)


def check_names(settings: VllmSettings) -> None:
    """InvalidRequestError for names in `engine_arguments` that kvmesh sets itself."""
    for name in settings.engine_arguments:
        if reason := SET_BY_KVMESH.get(name):
            raise InvalidRequestError(
                f"engine_arguments must not have {name}: {reason}", field="engine_arguments", reason="invalid_settings"
            )


def base_arguments(settings: VllmSettings) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": settings.served_name or None,
        "revision": settings.revision or None,
        "runner": settings.runner,
        "dtype": settings.dtype,
        # -1 shortens the model's context to what the KV memory holds.
        "max_model_len": settings.context_tokens_max or -1,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "skip_tokenizer_init": not loads_tokenizer(settings),
        "worker_extension_cls": EXTENSION,
    }
    if not settings.json_whitespace:
        from vllm.config import StructuredOutputsConfig

        values["structured_outputs_config"] = StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True)
    if settings.nodes > 1:
        values |= node_arguments(settings)
    if settings.step_tokens_max:
        values["max_num_batched_tokens"] = settings.step_tokens_max
    if settings.enable_lora:
        values |= {
            "enable_lora": True,
            "max_loras": min(settings.adapters_running_max, settings.adapters_max),
            "max_cpu_loras": settings.adapters_max,
            "max_lora_rank": settings.adapter_rank_max,
        }
    return values


def node_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Ranks on several machines: each machine starts its own, which meet at the leader's address."""
    host, port = meeting_address(settings.nodes_address)
    return {
        "nnodes": settings.nodes,
        "node_rank": settings.node_rank,
        "master_addr": host,
        "master_port": port,
        "distributed_executor_backend": "mp",
    }


def cpu_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Returns vLLM's arguments on a CPU. An explicit size of the KV memory avoids vLLM's profiling run; eager mode avoids the compiler."""
    return {
        "block_size": settings.block_size_tokens or CPU_BLOCK_SIZE_TOKENS,
        "kv_cache_memory_bytes": settings.kv_cache_bytes or CPU_KV_CACHE_BYTES,
        "max_num_seqs": settings.running_requests_max or CPU_RUNNING_REQUESTS,
        "enforce_eager": settings.enforce_eager is not False,
    }


def gpu_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Omitted arguments take vLLM's defaults."""
    values: dict[str, Any] = {
        "gpu_memory_utilization": settings.gpu_memory_fraction,
        "enforce_eager": bool(settings.enforce_eager),
    }
    if settings.block_size_tokens:
        values["block_size"] = settings.block_size_tokens
    if settings.kv_cache_bytes:
        values["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    if settings.running_requests_max:
        values["max_num_seqs"] = settings.running_requests_max
    if settings.device_ids:
        values["device_ids"] = [int(word) if word.isdecimal() else word for word in settings.device_ids]
    return values


def usage_context(*, is_cpu: bool) -> Any:
    """Selects vLLM's defaults: on a GPU its server's, which depend on the device's memory (concurrent requests, tokens of a step); on
    CPU its engine's, which give short steps."""
    from vllm.usage.usage_lib import UsageContext

    return UsageContext.ENGINE_CONTEXT if is_cpu else UsageContext.OPENAI_API_SERVER


def connector_arguments(settings: VllmSettings, holds_path: str) -> dict[str, Any]:
    """KV events and NIXL. The event publisher is replaced after the start, see `VllmCore`."""
    from vllm.config import KVEventsConfig, KVTransferConfig

    values: dict[str, Any] = {
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    }
    if settings.has_kv_transfer:
        values["kv_transfer_config"] = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_connector_module_path=CONNECTOR_MODULE,
            kv_role="kv_both" if settings.can_switch_role else ROLES[settings.role],
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                # No threads besides the progress thread: the engine thread posts the pulls.
                "num_threads": 0,
                HOLDS_PATH: holds_path,
                SECRET_FILE: settings.mesh_secret_file,
                "kv_lease_duration": int(settings.lease_s) if settings.lease_s.is_integer() else settings.lease_s,
            },
        )
    return values


def loads_tokenizer(settings: VllmSettings) -> bool:
    """Prompts are token ids, so vLLM needs a tokenizer for structured output only."""
    if settings.tokenizer != "auto":
        return settings.tokenizer == "load"
    folder = Path(settings.model)
    return not folder.is_dir() or (folder / "tokenizer.json").is_file()
