"""SGLang's registration."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvmesh.core import Capabilities
from kvmesh.engines.base import Engine
from kvmesh.engines.ranked import RankedEngine, with_ranks
from kvmesh.engines.registration import (
    DeviceAssignment,
    EngineHost,
    EngineRegistration,
    GpuSupport,
    rank_port,
    with_features,
)
from kvmesh.engines.sglang.host_process import find_python
from kvmesh.engines.sglang.settings import GPU_MEMORY_FRACTION, SglangSettings
from kvmesh.errors import InvalidRequestError
from kvmesh.kv.paths import KvPaths
from kvmesh.lifecycle import RunningPart


def make(settings: SglangSettings, host: EngineHost) -> Engine:
    settings = on_host(settings, host)
    engines = [make_rank(settings, host, rank) for rank in range(settings.data_parallel_size)]
    # Both engines of a rendezvous report its failure, so no paths are recorded.
    return engines[0] if len(engines) == 1 else RankedEngine(engines, KvPaths(pull_timeout_s=settings.pull_timeout_s))


def make_follower(settings: SglangSettings, host: EngineHost) -> RunningPart | None:
    from kvmesh.engines.sglang.engine import SglangEngine
    from kvmesh.engines.sglang.follower import SglangFollower

    return SglangFollower(SglangEngine(on_host(settings, host))) if settings.node_rank else None


def on_host(settings: SglangSettings, host: EngineHost) -> SglangSettings:
    return replace(
        settings,
        model=host.model,
        served_name=host.served_name,
        role=host.role.value,
        waiting_requests_max=host.requests_max,
        lease_s=host.kv.lease_s,
        pull_timeout_s=host.kv.pull_timeout_s,
        bootstrap_host=host.address,
        secret_file=host.mesh_secret_file,
    )


def make_rank(settings: SglangSettings, host: EngineHost, rank: int) -> Engine:
    from kvmesh.engines.sglang.engine import SglangEngine

    port = (
        rank_port(settings.bootstrap_port, rank=rank, host=host)
        if "prefill" in settings.modes
        else settings.bootstrap_port
    )
    return SglangEngine(replace(settings, bootstrap_port=port, device_ids=rank_devices(settings, rank)))


def rank_devices(settings: SglangSettings, rank: int) -> tuple[str, ...]:
    """Returns the GPUs of a data-parallel rank: those after the GPUs of the one before."""
    here = len(settings.ranks_here)
    needed = settings.data_parallel_size * here
    if settings.device_ids and len(settings.device_ids) != needed:
        raise InvalidRequestError(f"device_ids must name {needed} GPUs, one for each rank", field="device_ids")
    if settings.data_parallel_size == 1:
        return settings.device_ids
    every = settings.device_ids or tuple(map(str, range(needed)))
    return every[rank * here : (rank + 1) * here]


def device_flags(assignment: DeviceAssignment) -> Sequence[str]:
    """Keeps all devices visible to the worker, since UCX's `cuda_ipc` needs the peer's devices."""
    fraction = min(assignment.memory_fraction, GPU_MEMORY_FRACTION)
    flags = ["--sglang-gpu-memory-fraction", f"{fraction:g}"]
    if assignment.positions:
        flags += ["--sglang-device-ids", ",".join(str(position) for position in assignment.positions)]
    if assignment.kv_bytes:
        flags += ["--sglang-kv-cache-bytes", str(assignment.kv_bytes)]
    return tuple(flags)


def installed_build(python: str = "") -> str:
    """Returns `gpu` or `cpu`, by the build of torch in SGLang's environment; empty if there is no such environment."""
    packages = Path(python or find_python("")).parents[1] / "lib"
    builds = [path.name for path in packages.glob("python*/site-packages/torch-*.dist-info")]
    has_sglang = any(packages.glob("python*/site-packages/sglang-*.dist-info"))
    if not (builds and has_sglang):
        return ""
    return "cpu" if "+cpu" in builds[0] else "gpu"


def all_capabilities() -> Capabilities:
    """Returns the capabilities of a generating and of an embedding model together, with adapters, a tokenizer and several ranks."""
    from kvmesh.engines.sglang.description import VERSION, capabilities

    settings = SglangSettings(model="any", enable_lora=True, can_switch_role=True)
    alone = replace(settings, has_kv_transfer=False, can_switch_role=False)
    records = [
        capabilities(each, version=VERSION, has_tokenizer=True, honors_seeds=True, is_embedding=is_embedding)
        for each, is_embedding in ((settings, False), (alone, False), (alone, True))
    ]
    names = dict.fromkeys(name for each in records for name in each.features)
    return with_features(with_ranks(replace(records[0], features=tuple(names))), "multi_rank", "multi_node")


SGLANG = EngineRegistration(
    name="sglang",
    title="SGLang",
    settings_type=SglangSettings,
    make_settings=lambda: SglangSettings(model="set by the host"),
    set_by_host=(
        "model",
        "served_name",
        "role",
        "waiting_requests_max",
        "lease_s",
        "pull_timeout_s",
        "bootstrap_host",
        "secret_file",
    ),
    make=make,
    make_follower=make_follower,
    capabilities=all_capabilities,
    unsupported={
        "sleep": "this engine cannot here",
        "handoff:sequential": "a failed handoff places the request again",
        "continued_penalties": "it counts emitted tokens as prompt; refused",
        "continued_structured_output": "its grammar begins with the leg; refused",
    },
    start_timeout_s=lambda settings: settings.start_timeout_s,
    flags_without_prefill=("--no-sglang-has-kv-transfer",),
    gpu=GpuSupport(
        builds={}, find_build=installed_build, ranks_flag="--sglang-tensor-parallel-size", device_flags=device_flags
    ),
)
