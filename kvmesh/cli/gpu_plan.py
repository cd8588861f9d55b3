"""Plans the GPUs of a mesh's workers: flags and variables for each worker, and a table for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmesh.cli.devices import GIB, MemoryShare, WorkerDevices, WorkerGroup, place_workers, share_memory, topology_order
from kvmesh.cli.nvidia import FARTHEST_DISTANCE, Driver, NvidiaDevice, visible_devices
from kvmesh.cli.output import Row, render_table
from kvmesh.engines.registration import DeviceAssignment, EngineRegistration, GpuSupport, installed_version
from kvmesh.errors import InvalidRequestError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Makes CUDA number devices by bus position, like the driver's library, instead of by speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlaces:
    """Flags, start turns and variables by worker name, and the table. Empty: engines choose devices themselves."""

    argv: Mapping[str, Sequence[str]] = field(default_factory=dict)
    turns: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    lines: Sequence[str] = ()


def installed_build(gpu: GpuSupport) -> str:
    """`gpu` or `cpu`, by the engine's installed distribution; empty if the engine is not installed."""
    if gpu.find_build is not None:
        return gpu.find_build()
    return next((build for name, build in gpu.builds.items() if installed_version(name)), "")


def place_on_gpus(
    engine: EngineRegistration[Any],
    driver: Driver,
    groups: Sequence[WorkerGroup],
    *,
    visible: str | None,
    has_order: bool,
    workers_per_device: int,
    model: Path,
) -> WorkerPlaces:
    """Places all workers. `visible` is CUDA_VISIBLE_DEVICES; `has_order`: the user has set CUDA_DEVICE_ORDER.

    InvalidRequestError when there is no device or when the workers do not fit.
    """
    devices = visible_devices(driver.devices, visible)
    if not devices:
        cause = driver.problem or f"CUDA_VISIBLE_DEVICES={visible} leaves none of {len(driver.devices)} devices"
        raise InvalidRequestError(
            f"the CUDA build of {engine.title} is installed, but there is no device for it: {cause}. `kvmesh doctor` checks the machine;"
            " KVMESH_ENGINE_BUILD=cpu make up installs the CPU build",
            field="gpus",
        )

    def distance(first: int, second: int) -> int:
        return driver.distances.get((devices[first].index, devices[second].index), FARTHEST_DISTANCE)

    order = topology_order(range(len(devices)), distance)
    placements = place_workers(order, groups, workers_per_device=workers_per_device)
    weights = weight_bytes(model)
    shares = {
        placement.name: share_memory(
            placement,
            device_bytes=min(devices[position].memory_bytes for position in placement.positions),
            weight_bytes=weights,
        )
        for placement in placements
    }
    assert engine.gpu is not None
    return WorkerPlaces(
        argv={
            each.name: engine.gpu.device_flags(assignment(each, shares[each.name], len(devices))) for each in placements
        },
        turns={each.name: each.turn for each in placements},
        env={} if has_order else BUS_ORDER,
        lines=table(driver, devices=devices, placements=placements, shares=shares),
    )


def assignment(placement: WorkerDevices, share: MemoryShare, devices: int) -> DeviceAssignment:
    """Returns the GPUs of one worker among `devices` visible ones."""
    takes_all = placement.positions == tuple(range(devices))
    return DeviceAssignment(
        positions=() if takes_all else placement.positions, memory_fraction=share.fraction, kv_bytes=share.kv_bytes
    )


def weight_bytes(model: Path) -> int:
    """Returns the bytes of a model directory's weights in the first format that it has; 0 for a hub name."""
    if not model.is_dir():
        return 0
    for suffix in WEIGHT_SUFFIXES:
        if total := sum(path.stat().st_size for path in model.iterdir() if path.suffix == suffix):
            return total
    return 0


def table(
    driver: Driver,
    *,
    devices: Sequence[NvidiaDevice],
    placements: Sequence[WorkerDevices],
    shares: Mapping[str, MemoryShare],
) -> Sequence[str]:
    """Returns the lines that show each worker's GPUs and memory, and idle GPUs."""
    cuda = f", CUDA {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda[0] else ""
    lines = [f"{len(devices)} GPUs by {driver.source} (driver {driver.version}{cuda}): {names(devices)}"]
    rows: list[Row] = []
    for each in placements:
        share = shares[each.name]
        memory = min(devices[position].memory_bytes for position in each.positions)
        kv = f"{share.kv_bytes / GIB:.1f} GiB" if share.kv_bytes else "what is left"
        rows.append(
            (
                each.name,
                " ".join(str(devices[position].index) for position in each.positions),
                f"{share.fraction:g} of {memory / GIB:.0f} GiB" if memory else f"{share.fraction:g}",
                kv,
                f"{each.sharers} workers, number {each.turn + 1} to start" if each.sharers > 1 else "no",
            )
        )
    lines += render_table(("worker", "GPUs", "memory of each", "for KV", "shared"), rows).splitlines()
    used = {position for each in placements for position in each.positions}
    if idle := [str(device.index) for position, device in enumerate(devices) if position not in used]:
        lines.append(f"idle GPUs: {' '.join(idle)}; --prefill, --decode and --tensor-parallel use more")
    return lines


def names(devices: Sequence[NvidiaDevice]) -> str:
    """Device names with their counts."""
    kinds = dict.fromkeys(device.name for device in devices)
    return ", ".join(f"{sum(device.name == kind for device in devices)} x {kind}" for kind in kinds)
