"""How a service authenticates itself and its peers: by files, or by Consul Connect."""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Any, cast

from kvmesh.clock import Clock
from kvmesh.discovery.base import Registry, View
from kvmesh.discovery.connect.identity import ConnectIdentity
from kvmesh.discovery.sealed import open_registry
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import InvalidRequestError
from kvmesh.identity.certificates import CertificateSource, source_of
from kvmesh.identity.permissions import Intentions
from kvmesh.identity.roles import SERVICE_PREFIX, SERVING, MeshRole
from kvmesh.identity.settings import IdentitySource, MeshSettings
from kvmesh.lifecycle import Part
from kvmesh.telemetry import Instruments

ADDRESSES_MAX = 16_384


class AddressBook:
    """The roles of addresses as the registry listed them last. Addresses that it lists no more stay until there are too many."""

    def __init__(self) -> None:
        self._roles: OrderedDict[str, MeshRole] = OrderedDict()

    def note(self, view: View) -> None:
        role = MeshRole(view.service.removeprefix(SERVICE_PREFIX))
        for instance in view.instances:
            self._roles[instance.address] = role
            self._roles.move_to_end(instance.address)
        while len(self._roles) > ADDRESSES_MAX:
            self._roles.popitem(last=False)

    def role_of(self, address: str) -> MeshRole | None:
        """Returns None if the registry has not listed it."""
        return self._roles.get(address)


class NotedRegistry:
    """Writes the instances that pass through it into a book. The rest of the interface is the inner registry's."""

    def __init__(self, registry: Registry, book: AddressBook) -> None:
        self._registry = registry
        self._book = book

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    async def instances(self, service: str) -> View:
        """See `Registry.instances`."""
        view = await self._registry.instances(service)
        self._book.note(view)
        return view

    async def watch(self, service: str) -> AsyncGenerator[View, None]:
        """See `Registry.watch`."""
        async with aclosing(self._registry.watch(service)) as views:
            async for view in views:
                self._book.note(view)
                yield view


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
        """Returns the service's registry client. The channels use it to look up which role is at an address."""
        return cast(Registry, NotedRegistry(open_registry(discovery, mesh), self.book))


def open_identity(mesh: MeshSettings, discovery: DiscoverySettings, role: MeshRole, *, clock: Clock) -> ServiceIdentity:
    """Returns the identity of a service. InvalidRequestError when the settings contradict each other or a file cannot be used."""
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
