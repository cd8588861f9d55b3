"""The two settings of a service's network."""

from dataclasses import dataclass

from kvmesh.network.ports import PortRange
from kvmesh.settings import setting


# No slots: services' settings inherit from this class and from classes with slots.
@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """Where a service listens, and where others reach it."""

    address: str = setting(
        "",
        "This host's address for the mesh: the service listens on it and registers it, for gRPC, metrics, HTTP and KV. A name is"
        " resolved once. Empty: 127.0.0.1 with a registry on this machine, otherwise the address that reaches the registry.",
    )
    port_range: str = setting(
        "",
        "FIRST-LAST, for firewalls: ports that are not named are taken from the first half, UCX's from the second. All services of a"
        " host may share a range. Empty: any free ports.",
    )

    insecure_listen: bool = setting(
        False,
        "allow plain text between services on an address that other machines reach: no mesh TLS, on a network of its own",
    )

    def __post_init__(self) -> None:
        """ValueError for a range that is none."""
        if self.port_range:
            PortRange.parse(self.port_range)

    @property
    def ports(self) -> PortRange | None:
        return PortRange.parse(self.port_range) if self.port_range else None
