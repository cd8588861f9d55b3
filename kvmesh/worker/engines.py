"""Which engines there are, and how each is made from a worker's settings. Adapters are imported only when asked for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvmesh.clock import Clock
from kvmesh.core import Role
from kvmesh.engines.base import Engine
from kvmesh.errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from kvmesh.engines.simulated.settings import SimulatedSettings
    from kvmesh.kv.transport import KvTransport
    from kvmesh.worker.settings import HostSettings


def make_engine(settings: "HostSettings", role: Role, clock: Clock) -> Engine:
    """The engine named in the settings. UnsupportedError when its packages are not installed here."""
    try:
        return ENGINES[settings.engine](settings, role, clock)
    except ImportError as error:
        raise UnsupportedError(
            f"the engine {settings.engine} is not installed here ({error}); see the extras in pyproject.toml",
            reason="engine_missing",
            field="engine",
        ) from error


def served_name(settings: "HostSettings") -> str:
    """What clients ask for: as set, or the last part of the model's name."""
    return settings.served_name or Path(settings.model).name


def _simulated(settings: "HostSettings", role: Role, clock: Clock) -> Engine:
    from kvmesh.engines.simulated.engine import SimulatedEngine

    own = replace(settings.simulated, model=served_name(settings), model_dir=settings.model, role=role.value)
    return SimulatedEngine(own, clock, _transport(own))


def _transport(own: "SimulatedSettings") -> "KvTransport | None":
    if own.kv_transport == "none":
        return None
    if own.kv_transport == "nixl":
        from kvmesh.kv.nixl_transport import NixlSettings, NixlTransport

        return NixlTransport(
            NixlSettings(progress_delay_us=own.nixl_progress_delay_us, inline_bytes_max=own.nixl_inline_bytes_max)
        )
    raise InvalidRequestError(
        "kv_transport must be nixl or none between processes", field="simulated.kv_transport", reason="invalid_settings"
    )


def _vllm(settings: "HostSettings", role: Role, clock: Clock) -> Engine:
    from kvmesh.engines.vllm.engine import VllmEngine

    own = replace(settings.vllm, model=settings.model, served_name=served_name(settings), role=role.value)
    return VllmEngine(own)


ENGINES: dict[str, Callable[["HostSettings", Role, Clock], Engine]] = {"simulated": _simulated, "vllm": _vllm}
