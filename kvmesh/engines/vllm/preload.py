"""Imports vLLM in the fork server, without garbage collection: the import makes two million objects, none of them garbage."""

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator

from kvmesh.engines.vllm.cpu import forbid_compiling
from kvmesh.engines.vllm.environment import reduce_nixl_polling, set_defaults
from kvmesh.lifecycle.import_threads import single_threaded_imports

MODULES = (
    "torch",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.sampling_params",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.kv_cache_utils",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "vllm.lora.request",
)
CPU_MODULES = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "transformers.models.auto.tokenization_auto",
)

IMPORT_ENVIRONMENT = {"HUMMING_DISABLE_PARALLEL_BUILD": "1"}
"""On CUDA, vLLM's quantisation modules import `humming`, which would start two threads that compile in the background. With this it
compiles on demand."""


@contextlib.contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Saves about two seconds of collections. Objects that are made inside are never collected."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def without_grpc() -> Iterator[None]:
    """Hides gRPC, which vLLM imports for its own tracing: a process that forks must not load it."""
    if "grpc" in sys.modules:
        yield
        return
    sys.modules["grpc"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["grpc"]


def preload() -> None:
    """Imports everything that a worker would. Starts no thread, not even on CUDA, and makes no NIXL agent."""
    set_defaults()
    with without_grpc(), garbage_collection_off(), single_threaded_imports(IMPORT_ENVIRONMENT):
        is_cpu = bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())
        if is_cpu:
            forbid_compiling()
        for name in (*MODULES, *CPU_MODULES) if is_cpu else MODULES:
            importlib.import_module(name)
        if importlib.util.find_spec("nixl") is not None:
            reduce_nixl_polling()
