"""vLLM's ranks of one machine without its scheduler. Imports vllm, so the environment must be set before."""

from collections.abc import Callable
from typing import Any

from kvmesh.engines.vllm.arguments import engine_arguments, usage_context
from kvmesh.engines.vllm.cpu import allow_model_compiling, forbid_compiling
from kvmesh.engines.vllm.preload import garbage_collection_off
from kvmesh.engines.vllm.ranks import ranks_die_with_this_thread
from kvmesh.engines.vllm.settings import VllmSettings


def start_ranks(settings: VllmSettings, died: Callable[[], None]) -> Any:
    """vLLM's executor, ready. `died` is called, in a thread of its own, when a rank has ended."""
    with garbage_collection_off():
        from vllm.platforms import current_platform

        is_cpu = bool(current_platform.is_cpu())
        if is_cpu:
            forbid_compiling()
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        # The engine has no KV connector, so there is no hold table.
        arguments = engine_arguments(settings, is_cpu=is_cpu, holds_path="")
        if is_cpu:
            allow_model_compiling(not arguments.enforce_eager)
        config = arguments.create_engine_config(usage_context=usage_context(is_cpu=is_cpu), headless=True)
        with ranks_die_with_this_thread():
            executor = MultiprocExecutor(config, monitor_workers=False)
    executor.register_failure_callback(died)
    executor.start_worker_monitor()
    return executor
