"""How a service proves who it is and knows its peers: files, or Consul Connect."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import SystemRandom
from typing import cast

from kvmesh.clock import Clock
from kvmesh.discovery.addresses import AddressBook, NotedRegistry
from kvmesh.discovery.base import Registry
from kvmesh.discovery.connect.identity import ConnectIdentity
from kvmesh.discovery.sealed import open_registry
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import InvalidRequestError
from kvmesh.identity.certificates import CertificateSource, source_of
from kvmesh.identity.intentions import Intentions
from kvmesh.identity.roles import SERVING, MeshRole
from kvmesh.identity.settings import IdentitySource, MeshSettings
from kvmesh.lifecycle import Part
from kvmesh.telemetry import Instruments


async def _unchanged(role: MeshRole) -> Callable[[], None]:
    """Certificates in files stay as they are: they are for both roles of a worker."""
    return lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceIdentity:
    """What the parts of a process need for mesh TLS. Without mesh TLS `source` is None."""

    source: CertificateSource | None = None
    intentions: Intentions | None = None
    parts: Sequence[Part] = ()
    """They start before servers and clients, and close after them."""
    book: AddressBook = field(default_factory=AddressBook)
    prepare: Callable[[MeshRole], Awaitable[Callable[[], None]]] = _unchanged
    """Gets a worker's identity in another role; the returned function takes it. MeshError: the worker must keep its role."""

    def add_metrics(self, instruments: Instruments) -> None:
        """The time left of a certificate that the service follows."""
        if isinstance(self.source, ConnectIdentity):
            instruments.gauge_function(
                "certificate_left_seconds",
                help="Time until the certificate of Consul expires; negative afterwards.",
                function=self.source.seconds_left,
            )

    def registry(self, discovery: DiscoverySettings, mesh: MeshSettings) -> Registry:
        """The service's registry client, which tells the channels who is at an address."""
        return cast(Registry, NotedRegistry(open_registry(discovery, mesh), self.book))


def open_identity(mesh: MeshSettings, discovery: DiscoverySettings, role: MeshRole, *, clock: Clock) -> ServiceIdentity:
    """The identity of a service. InvalidRequestError when the settings contradict each other or a file cannot be used."""
    if mesh.identity is IdentitySource.FILES:
        return ServiceIdentity(source=source_of(mesh.tls_directory))
    if mesh.tls_directory:
        raise InvalidRequestError(
            "mesh.tls_directory is for --mesh-identity files; with consul the certificate comes from Consul's agent",
            field="mesh.tls_directory",
        )
    connect = ConnectIdentity(discovery, role, clock=clock, generator=SystemRandom(), wait_s=mesh.identity_wait_s)
    return ServiceIdentity(
        source=connect,
        intentions=connect if role in SERVING else None,
        parts=[connect],
        prepare=connect.prepare,
    )
