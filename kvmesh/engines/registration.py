"""What a worker process and `kvmesh up` know about an engine before they import it: one record per adapter package."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvmesh.clock import Clock
from kvmesh.core import Capabilities, Role
from kvmesh.engines.base import Engine
from kvmesh.kv.settings import KvSettings

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHost:
    """What a worker process gives its engine. `model` is a directory or a hub name."""

    model: str
    served_name: str
    role: Role
    kv: KvSettings
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAssignment:
    """One worker's GPUs. `positions` among the visible devices; empty: all of them. `kv_bytes` 0: the engine measures what is free."""

    positions: Sequence[int]
    memory_fraction: float
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSupport:
    """How `kvmesh up` gives GPUs to workers of an engine.

    `builds` maps the distribution that set-up installs to `gpu` or `cpu`. `ranks_flag` takes the number of tensor-parallel ranks.
    """

    builds: Mapping[str, str]
    ranks_flag: str
    device_flags: Callable[[DeviceAssignment], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRegistration(Generic[S]):
    """One engine.

    `name` is the value of `--engine` and the prefix of the engine's flags; `title` is the name in messages.
    `make` imports the engine. ImportError when its packages are not installed.
    `make_settings` gives the defaults of a worker process; fields in `set_by_host` are filled in by `make` and have no flag.
    `start_timeout_s` is what the engine's start may take beyond that of the other parts.
    `preload` is the `module:function` that imports the engine in a fork server, from which workers are then forked; empty: workers are
    started without one.
    `prefill_joins_late`: the mesh serves before its prefill workers are registered.
    `capabilities` gives the record with every optional feature on; `unsupported` gives the reason for features that will not come.
    """

    name: str
    title: str
    settings_type: type[S]
    make_settings: Callable[[], S]
    set_by_host: Sequence[str]
    make: Callable[[S, EngineHost], Engine]
    capabilities: Callable[[], Capabilities]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: Callable[[S], float] = lambda settings: 0.0
    preload: str = ""
    prefill_joins_late: bool = False
    gpu: GpuSupport | None = None
