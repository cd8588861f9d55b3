"""How commands reach a running mesh: its registry, and the services that the registry lists."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvmesh.cli.state import find_mesh
from kvmesh.core import WorkerView
from kvmesh.discovery.base import ROUTER, Instance, Registry
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import UnavailableError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import setting

CALL_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class MeshChoice:
    """Which mesh a command shows. Settings that several commands share."""

    mesh: str = setting("", "name of a mesh that `kvmesh up` runs here; needed where there are several")
    consul: str = setting("", "address of the Consul agent; empty: the mesh that `kvmesh up` started here")
    token: str = setting("", "Consul ACL token", secret=True)

    def registry_address(self) -> str:
        """NotFoundError lists the running meshes if the choice is not clear."""
        return self.consul or find_mesh(self.mesh, otherwise="--consul").registry


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
async def connect(choice: MeshChoice, address: str) -> AsyncIterator[MeshConnection]:
    """Connects to the mesh with this registry address. Nothing is asked yet."""
    registry = ConsulRegistry(DiscoverySettings(address=address, token=choice.token))
    channels = ChannelPool(RpcSettings())
    try:
        yield MeshConnection(registry=registry, channels=channels)
    finally:
        await channels.aclose()
        await registry.aclose()
