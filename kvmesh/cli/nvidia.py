"""Reads the NVIDIA driver's version and devices, through NVML or `nvidia-smi`.

Uses the standard library only, since `scripts/set_up.py` imports it before anything is installed.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

NVML_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
SMI_PATHS = ("/usr/lib/wsl/lib", "/usr/local/nvidia/bin", "/opt/bin")
SMI_TIMEOUT_S = 30.0
"""`nvidia-smi` wakes sleeping devices, which takes some seconds each."""
SMI_FIELDS = "index,uuid,name,memory.total,driver_version"
NVLINK_DISTANCE = 1
FARTHEST_DISTANCE = 50
"""NVML's level for devices on different processors."""
P2P_NVLINK = 2
TEXT_BYTES = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaDevice:
    """One GPU. `index` is the driver's number, in the order of the bus."""

    index: int
    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """`problem` explains why there are no devices. `cuda` is the newest CUDA version that the driver supports; (0, 0): unknown.

    `distances` maps pairs of indices to the distance between devices: 1 for NVLink, then NVML's levels from 10 (one board) to 50
    (different processors).
    """

    devices: Sequence[NvidiaDevice] = ()
    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    source: str = ""
    problem: str = ""
    distances: Mapping[tuple[int, int], int] = field(default_factory=dict)


def read_driver() -> Driver:
    """Reads NVML, or else `nvidia-smi`. Never raises."""
    by_library = _read_nvml()
    if by_library.devices:
        return by_library
    by_program = _read_smi()
    return by_program if by_program.devices else by_library


def visible_devices(devices: Sequence[NvidiaDevice], wanted: str | None) -> Sequence[NvidiaDevice]:
    """Returns the devices that `CUDA_VISIBLE_DEVICES` selects, in its order; all devices when it is not set (None).

    Like CUDA, accepts numbers and unique prefixes of UUIDs, and ignores the rest of the list after an entry that names no device.
    """
    if wanted is None:
        return devices
    found: list[NvidiaDevice] = []
    for entry in (word.strip() for word in wanted.split(",")):
        if entry.isdecimal():
            named = [device for device in devices if device.index == int(entry)]
        else:
            named = [device for device in devices if entry and device.uuid.startswith(entry)]
        if len(named) != 1:
            break
        found += named
    return found


class _NvmlError(Exception):
    """An NVML call failed."""


def _read_nvml() -> Driver:
    library = _load_nvml()
    if library is None:
        return Driver(problem="the NVIDIA driver's library libnvidia-ml.so.1 is not on this machine")
    try:
        _call(library, "nvmlInit_v2")
    except (_NvmlError, AttributeError) as error:
        return Driver(problem=f"the NVIDIA driver does not answer ({error})")
    try:
        return _read_devices(library)
    except (_NvmlError, AttributeError) as error:
        return Driver(problem=f"the NVIDIA driver does not list its devices ({error})")
    finally:
        library.nvmlShutdown()


def _load_nvml() -> "ctypes.CDLL | None":
    for name in NVML_LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        library.nvmlErrorString.restype = ctypes.c_char_p
        words = library.nvmlErrorString(status)
        raise _NvmlError(f"{name}: {words.decode() if words else f'error {status}'}")


def _read_devices(library: ctypes.CDLL) -> Driver:
    count = ctypes.c_uint()
    _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    handles = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        handles.append(handle)
    devices = [_device(library, index, handle) for index, handle in enumerate(handles)]
    return Driver(
        devices=devices,
        version=_text(lambda buffer, size: _call(library, "nvmlSystemGetDriverVersion", buffer, size)),
        cuda=_cuda_version(library),
        source="NVML",
        problem="" if devices else "the NVIDIA driver lists no device",
        distances=_distances(library, handles),
    )


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _device(library: ctypes.CDLL, index: int, handle: ctypes.c_void_p) -> NvidiaDevice:
    memory = _Memory()
    try:
        _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    except _NvmlError:
        # Devices that share the processor's memory do not report their own.
        memory.total = 0
    return NvidiaDevice(
        index=index,
        uuid=_text(lambda buffer, size: _call(library, "nvmlDeviceGetUUID", handle, buffer, size)),
        name=_text(lambda buffer, size: _call(library, "nvmlDeviceGetName", handle, buffer, size)),
        memory_bytes=int(memory.total),
    )


def _text(read: Callable[[ctypes.Array[ctypes.c_char], ctypes.c_uint], None]) -> str:
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    read(buffer, ctypes.c_uint(TEXT_BYTES))
    return buffer.value.decode(errors="replace")


def _cuda_version(library: ctypes.CDLL) -> tuple[int, int]:
    number = ctypes.c_int()
    try:
        _call(library, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number))
    except (_NvmlError, AttributeError):
        return (0, 0)
    return (number.value // 1000, number.value % 1000 // 10)


def _distances(library: ctypes.CDLL, handles: Sequence[ctypes.c_void_p]) -> Mapping[tuple[int, int], int]:
    found = {}
    for first in range(len(handles)):
        for second in range(first + 1, len(handles)):
            distance = _distance(library, handles[first], handles[second])
            found[(first, second)] = found[(second, first)] = distance
    return found


def _distance(library: ctypes.CDLL, first: ctypes.c_void_p, second: ctypes.c_void_p) -> int:
    value = ctypes.c_int()
    try:
        _call(library, "nvmlDeviceGetP2PStatus", first, second, ctypes.c_int(P2P_NVLINK), ctypes.byref(value))
        if value.value == 0:
            return NVLINK_DISTANCE
        _call(library, "nvmlDeviceGetTopologyCommonAncestor", first, second, ctypes.byref(value))
    except (_NvmlError, AttributeError):
        # Virtual machines hide the bus.
        return FARTHEST_DISTANCE
    return max(value.value, NVLINK_DISTANCE)


def _read_smi() -> Driver:
    path = os.pathsep.join((os.environ.get("PATH", ""), *SMI_PATHS))
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return Driver(problem="there is no nvidia-smi")
    command = [program, f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Driver(problem=f"nvidia-smi does not run ({error})")
    if done.returncode != 0:
        return Driver(problem=f"nvidia-smi failed: {(done.stdout or done.stderr).strip()[:200]}")
    return parse_smi(done.stdout)


def parse_smi(text: str) -> Driver:
    """Returns the devices of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`."""
    devices, version = [], ""
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(SMI_FIELDS.split(",")) or not words[0].isdecimal():
            continue
        index, uuid, name, mebibytes, version = words
        memory_bytes = int(mebibytes) << 20 if mebibytes.isdecimal() else 0
        devices.append(NvidiaDevice(index=int(index), uuid=uuid, name=name, memory_bytes=memory_bytes))
    return Driver(
        devices=devices, version=version, source="nvidia-smi", problem="" if devices else "nvidia-smi lists no device"
    )
