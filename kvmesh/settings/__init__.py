"""Settings: one frozen dataclass per component, filled from flags, environment, a file and defaults, in this order of precedence.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class LeaseSettings:
        lease_s: float = setting(30.0, "How long an unused handle is kept.", min=0.1, max=3600)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class RouterSettings:
        model: str = required("Model directory or hub name.")
        kv: LeaseSettings = field(default_factory=LeaseSettings)

    settings = load_or_exit(RouterSettings, program="python -m services.router")

gives `--model`, `--kv-lease-s`, `KVMESH_MODEL`, `KVMESH_KV_LEASE_S`, and the keys `model` and `kv.lease_s` of the TOML
file that `--config` or `KVMESH_CONFIG` names.
"""

from kvmesh.settings.declare import group, internal, required, setting
from kvmesh.settings.flags import split_operands
from kvmesh.settings.load import SettingsError, load, load_or_exit
from kvmesh.settings.show import help_text

__all__ = [
    "SettingsError",
    "group",
    "help_text",
    "internal",
    "load",
    "load_or_exit",
    "required",
    "setting",
    "split_operands",
]
