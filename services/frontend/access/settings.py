"""Settings of access control."""

from dataclasses import dataclass

from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Access control. Without a file and without a key in Consul every request is allowed."""

    keys_file: str = setting("", "JSON file of API keys (docs/use/access.md). Empty: no file.")
    keys_consul_key: str = setting("", "Key in Consul KV that holds the same document. Empty: none.")
    prefix_sharing_tenants: tuple[str, ...] = setting(
        (),
        "Tenants that use each other's cached prefixes; `*`: all. Such a tenant can find out what the others have sent.",
    )
    shares_quotas: bool = setting(
        True, "Whether several frontends divide each quota equally; false: each frontend grants all of it."
    )

    def __post_init__(self) -> None:
        """Raises ValueError for two sources of keys."""
        if self.keys_file and self.keys_consul_key:
            raise ValueError("keys_file and keys_consul_key are mutually exclusive")

    @property
    def needs_key(self) -> bool:
        """True if requests must have a key."""
        return bool(self.keys_file or self.keys_consul_key)
