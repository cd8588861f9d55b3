"""How commands reach a running mesh: its registry, and the services that the registry lists."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvmesh.cli.state import MeshState, find_mesh, running_meshes
from kvmesh.core import WorkerView
from kvmesh.discovery.base import ROUTER, Instance, Registry
from kvmesh.discovery.sealed import open_registry
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import UnavailableError
from kvmesh.identity.certificates import source_of
from kvmesh.identity.credentials import Credentials, find_credentials
from kvmesh.identity.roles import MeshRole
from kvmesh.identity.settings import MeshSettings
from kvmesh.network.settings import NetworkSettings
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import group, setting
from kvmesh.settings.declare import specs

CALL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshTarget:
    """A mesh's registry, and what an operator shows to it and to the services. `credentials` None: nothing but the token."""

    address: str
    token: str = ""
    credentials: Credentials | None = None

    def registry(self) -> Registry:
        """A new client of the registry. InvalidRequestError when a file cannot be read."""
        token_file = self.credentials.token_file if self.credentials is not None and not self.token else ""
        discovery = DiscoverySettings(address=self.address, token=self.token, token_file=token_file)
        secret_file = self.credentials.secret_file if self.credentials is not None else ""
        return open_registry(discovery, MeshSettings(secret_file=secret_file))

    def channels(self) -> ChannelPool:
        """New channels to the services. InvalidRequestError when a certificate cannot be read."""
        folder = self.credentials.tls_directory(MeshRole.OPERATOR) if self.credentials is not None else ""
        return ChannelPool(RpcSettings(), mesh=source_of(folder))


@dataclass(frozen=True, kw_only=True)
class MeshChoice:
    """Which mesh a command shows. Settings that several commands share."""

    mesh: str = setting("", "name of a mesh that `kvmesh up` runs here; needed where there are several")
    consul: str = setting("", "address of the Consul agent; empty: the mesh that `kvmesh up` started here")
    token: str = setting("", "Consul ACL token", secret=True)
    credentials: str = setting(
        "", "folder with the operator's credentials (`kvmesh credentials`); empty: those of the mesh that runs here"
    )

    def target(self) -> MeshTarget:
        """NotFoundError lists the running meshes if the choice is not clear."""
        return choose_target(mesh=self.mesh, consul=self.consul, token=self.token, credentials=self.credentials)


def choose_target(*, mesh: str, consul: str, token: str, credentials: str) -> MeshTarget:
    """The mesh that a command's flags mean. NotFoundError lists the running meshes if the choice is not clear."""
    if consul:
        running = [each for each in running_meshes() if each.registry == consul]
        target = target_of(running[0]) if running else MeshTarget(address=consul)
    else:
        target = target_of(find_mesh(mesh, otherwise="--consul"))
    found = find_credentials(credentials) if credentials else target.credentials
    return MeshTarget(address=target.address, token=token, credentials=found)


def target_of(state: MeshState) -> MeshTarget:
    """A mesh of this user on this machine."""
    credentials = find_credentials(state.credentials) if state.credentials else None
    return MeshTarget(address=state.registry, credentials=credentials)


@dataclass(frozen=True, kw_only=True)
class _ServiceNetwork(NetworkSettings):
    discovery: DiscoverySettings = group(DiscoverySettings)
    mesh: MeshSettings = group(MeshSettings)


SERVICE_VARIABLES = frozenset(spec.variable for spec in specs(_ServiceNetwork))
"""Variables that a shell has exported for services, which commands ignore without a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConnection:
    """An open connection to a mesh."""

    registry: Registry
    channels: ChannelPool

    async def list_workers(self, router: Instance | None = None) -> Sequence[WorkerView]:
        """The workers as a router sees them; None: the first one that is registered. UnavailableError if there is none."""
        routers = [router] if router is not None else (await self.registry.instances(ROUTER)).instances
        if not routers:
            raise UnavailableError("no router is registered", reason="no_router")
        return await GrpcRouterClient(self.channels, routers[0].address).list_workers(timeout_s=CALL_TIMEOUT_S)


@asynccontextmanager
async def connect(target: MeshTarget) -> AsyncIterator[MeshConnection]:
    """Connects to a mesh. Nothing is asked yet."""
    registry = target.registry()
    channels = target.channels()
    try:
        yield MeshConnection(registry=registry, channels=channels)
    finally:
        await channels.aclose()
        await registry.aclose()
