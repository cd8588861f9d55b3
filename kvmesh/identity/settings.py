"""How a service shows that it belongs to the mesh."""

from dataclasses import dataclass
from enum import StrEnum

from kvmesh.settings import internal, setting


class IdentitySource(StrEnum):
    """Where a service's certificate comes from."""

    FILES = "files"
    CONSUL = "consul"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    """`kvmesh up` and `kvmesh credentials` write these files; see docs/operate/security.md."""

    credentials: str = setting(
        "",
        "Folder of `kvmesh credentials` with the registry's token, the mesh's secret and this service's certificate. The other settings"
        " of this group name parts of it that are elsewhere.",
    )
    secret_file: str = setting(
        "",
        "File with the mesh's secret, the same for all services. Registrations and KV handles that are not sealed with it are"
        " refused. Empty: nothing is sealed.",
    )
    tls_directory: str = setting(
        "",
        "Folder with tls.crt, tls.key and ca.crt (cert-manager's names): mutual TLS between services, and each method only for its"
        " roles. Changed files are used from the next connection on. Empty: plain text.",
    )
    identity: IdentitySource = setting(
        IdentitySource.FILES,
        "Where the certificate comes from. `files`: `tls_directory`. `consul`: Consul Connect, by the agent of `discovery.address`; its"
        " intentions then decide for each call, too (docs/deploy/identity.md).",
    )
    # Consul elects a leader in seconds and issues a certificate in milliseconds.
    identity_wait_s: float = internal(60.0, "longest wait for Consul's first certificate when a service starts")

    @property
    def has_tls(self) -> bool:
        return bool(self.tls_directory) or self.identity is IdentitySource.CONSUL
