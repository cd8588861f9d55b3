"""TensorRT-LLM's registration."""

from collections.abc import Sequence
from dataclasses import replace

from kvmesh.core import Capabilities
from kvmesh.engines.base import Engine
from kvmesh.engines.ranked import with_ranks
from kvmesh.engines.registration import DeviceAssignment, EngineHost, EngineRegistration, GpuSupport, with_features
from kvmesh.engines.trtllm.settings import TrtllmSettings


def make(settings: TrtllmSettings, host: EngineHost) -> Engine:
    from kvmesh.engines.trtllm.engine import TrtllmEngine

    return TrtllmEngine(
        replace(
            settings,
            model=host.model,
            served_name=host.served_name,
            role=host.role.value,
            waiting_requests_max=host.requests_max,
            lease_s=host.kv.lease_s,
            pull_timeout_s=host.kv.pull_timeout_s,
        ),
        now=host.clock.now,
    )


def device_flags(assignment: DeviceAssignment) -> Sequence[str]:
    flags = ["--trtllm-gpu-memory-fraction", f"{assignment.memory_fraction:g}"]
    if assignment.positions:
        flags += ["--trtllm-device-ids", ",".join(str(position) for position in assignment.positions)]
    return tuple(flags)


def all_capabilities() -> Capabilities:
    """Returns the capabilities of an engine with a tokenizer, adapters and several ranks."""
    from kvmesh.engines.trtllm.description import capabilities

    record = capabilities(TrtllmSettings(model="any", enable_lora=True, tokenizer="load"))
    return with_features(with_ranks(record), "multi_rank", "multi_node")


TRTLLM = EngineRegistration(
    name="trtllm",
    title="TensorRT-LLM",
    settings_type=TrtllmSettings,
    make_settings=lambda: TrtllmSettings(model="set by the host"),
    set_by_host=("model", "served_name", "role", "waiting_requests_max", "lease_s", "pull_timeout_s"),
    make=make,
    capabilities=all_capabilities,
    unsupported={
        "reset_cache": "the engine publishes no call for it",
        "sleep": "the engine cannot free registered memory",
        "roles:2": "the transfer limit is fixed at the start",
        "embeddings": "the adapter serves generating models only",
        "continued_penalties": "it counts emitted tokens as prompt; refused",
        "continued_seed": "its random state begins with the leg; refused",
        "continued_structured_output": "its grammar begins with the leg; refused",
    },
    start_timeout_s=lambda settings: settings.start_timeout_s,
    gpu=GpuSupport(
        builds={"tensorrt-llm": "gpu"}, ranks_flag="--trtllm-tensor-parallel-size", device_flags=device_flags
    ),
)
