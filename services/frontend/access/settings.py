"""Settings of access control."""

from dataclasses import dataclass

from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Who may ask. Without a file and without a key in Consul everybody may."""

    keys_file: str = setting("", "JSON file of API keys (docs/use/access.md). Empty: no file.")
    keys_consul_key: str = setting("", "Key in Consul KV that holds the same document. Empty: none.")
    reload_interval_s: float = setting(2.0, "Time between two reads of the keys; a rotation needs no restart.", min=0.1)
    tenants_max: int = setting(10_000, "Tenants counted at a time; each takes about 300 bytes.", min=1)
    shares_quotas: bool = setting(
        True, "Each of several frontends grants its equal part of a quota; false: each grants all of it."
    )

    def __post_init__(self) -> None:
        """One source of truth."""
        if self.keys_file and self.keys_consul_key:
            raise ValueError("keys_file and keys_consul_key exclude each other")

    @property
    def needs_key(self) -> bool:
        """Whether requests must carry a key."""
        return bool(self.keys_file or self.keys_consul_key)
