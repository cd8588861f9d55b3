"""The record of an adapter package that a worker process and `kvmesh up` read before they import the engine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Generic, TypeVar

from kvmesh.clock import Clock
from kvmesh.core import Capabilities, Role
from kvmesh.engines.base import Engine
from kvmesh.kv.settings import KvSettings
from kvmesh.lifecycle import RunningPart
from kvmesh.network.names import LOOPBACK
from kvmesh.network.ports import PortRange

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHost:
    """A worker process's parameters for its engine. `model` is a directory or a hub name.

    An engine that listens does so on `address`, which other workers connect to, at a port of `ports` if it is set.
    """

    model: str
    served_name: str
    role: Role
    kv: KvSettings
    clock: Clock
    address: str = LOOPBACK
    ports: PortRange | None = None
    requests_max: int = 1024
    """Requests that the worker accepts at the same time. The worker itself limits waiting requests, so its engine must not refuse fewer."""
    mesh_secret_file: str = ""
    """File with the mesh's secret, for channels of an engine's own between workers. Empty: none."""


def installed_version(*distributions: str) -> str:
    """Returns the version of the first of these distributions that is installed; empty if none is. Importing an engine instead takes seconds."""
    for name in distributions:
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def with_features(capabilities: Capabilities, *names: str) -> Capabilities:
    """With these features, of those that depend on settings only."""
    return replace(capabilities, features=(*capabilities.features, *names))


def free_port(host: EngineHost) -> int:
    """Returns a port of the host's range; without a range 0."""
    return host.ports.claim(host.address) if host.ports is not None else 0


def rank_port(port: int, rank: int, host: EngineHost) -> int:
    """Returns the port of a data-parallel rank: the following ones after `port`; without it a free one."""
    return port + rank if port else free_port(host)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAssignment:
    """One worker's GPUs.

    `positions` are indices of visible devices; empty: all. `kv_bytes` 0: the engine measures the free memory.
    """

    positions: Sequence[int]
    memory_fraction: float
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSupport:
    """How `kvmesh up` assigns GPUs to workers of an engine.

    `builds` maps names of distributions to `gpu` or `cpu`; `find_build` returns that for an engine in an environment of its own, or "".
    `ranks_flag` sets the number of tensor-parallel ranks.
    """

    builds: Mapping[str, str]
    ranks_flag: str
    device_flags: Callable[[DeviceAssignment], Sequence[str]]
    find_build: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRegistration(Generic[S]):
    """One engine.

    `name` is the value of `--engine` and the prefix of the engine's flags; `title` is the name in messages.
    `make` imports the engine. It raises ImportError when the engine's packages are not installed.
    `make_follower` returns the part of a machine that computes for a worker on another machine; None: this machine's worker serves.
    `make_settings` returns the defaults of a worker process. `make` sets the fields in `set_by_host`, so they have no flags.
    `start_timeout_s` is the limit on the engine's start, in addition to that of the other parts.
    `preload` is the `module:function` that imports the engine in a fork server, which then forks workers; empty: no fork server.
    `prefill_joins_late`: the mesh serves before its prefill workers are registered.
    `flags_without_prefill` are flags for the workers of a mesh without prefill workers.
    `capabilities` returns the record with every optional feature on; `unsupported` explains features that are not planned.
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
    make_follower: Callable[[S, EngineHost], RunningPart | None] = lambda settings, host: None
    preload: str = ""
    prefill_joins_late: bool = False
    flags_without_prefill: Sequence[str] = ()
    gpu: GpuSupport | None = None
