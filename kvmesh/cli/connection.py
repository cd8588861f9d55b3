"""How commands reach a running mesh: its registry, and the services that the registry lists."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvmesh.cli.state import MeshState, find_mesh, running_meshes
from kvmesh.clock import SystemClock
from kvmesh.core import WorkerView
from kvmesh.discovery.base import ROUTER, Instance, Registry
from kvmesh.discovery.identity import ServiceIdentity, open_identity
from kvmesh.discovery.sealed import open_registry
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.identity.certificates import source_of
from kvmesh.identity.credentials import Credentials, find_credentials
from kvmesh.identity.roles import MeshRole
from kvmesh.identity.settings import IdentitySource, MeshSettings
from kvmesh.lifecycle import RunningPart
from kvmesh.network.settings import NetworkSettings
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import SettingsError, group, load, setting
from kvmesh.settings.declare import specs

S = TypeVar("S")
CALL_TIMEOUT_S = 10.0
"""Longest wait for the answer of a service, its first connection included, which takes seconds on a busy machine."""
RPC = RpcSettings(connect_timeout_s=CALL_TIMEOUT_S)
IDENTITY_WAIT_S = 5.0
"""Longest wait for a certificate from Consul; short, because a user waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshTarget:
    """A mesh's registry, and what an operator shows to it and to the services. `credentials` None: nothing but the token."""

    address: str
    token: str = ""
    credentials: Credentials | None = None
    source: IdentitySource = IdentitySource.FILES

    def registry(self) -> Registry:
        """Returns a new client of the registry. InvalidRequestError when a file cannot be read."""
        return open_registry(self._discovery, self._mesh)

    def channels(self) -> ChannelPool:
        """New channels to the services with certificates in files. InvalidRequestError when one cannot be read."""
        return ChannelPool(settings=RPC, mesh=source_of(self._mesh.tls_directory))

    @asynccontextmanager
    async def identity(self) -> AsyncIterator[ServiceIdentity]:
        """The operator's identity, followed until the block ends. UnavailableError when Consul issues no certificate."""
        identity = open_identity(self._mesh, self._discovery, MeshRole.OPERATOR, clock=SystemClock())
        async with AsyncExitStack() as stack:
            for part in identity.parts:
                stack.push_async_callback(part.aclose)
                await part.start()
                if isinstance(part, RunningPart):
                    running = asyncio.create_task(part.run(), name="operator-identity")
                    stack.push_async_callback(asyncio.wait, [running])
                    stack.push_async_callback(part.aclose)
            yield identity

    def noted_registry(self, identity: ServiceIdentity) -> Registry:
        """Returns a new registry client. The identity's channels use it to look up which role is at an address."""
        return identity.registry(self._discovery, self._mesh)

    @property
    def _discovery(self) -> DiscoverySettings:
        token_file = self.credentials.token_file if self.credentials is not None and not self.token else ""
        return DiscoverySettings(address=self.address, token=self.token, token_file=token_file)

    @property
    def _mesh(self) -> MeshSettings:
        found = self.credentials
        has_files = found is not None and self.source is IdentitySource.FILES
        return MeshSettings(
            identity=self.source,
            secret_file=found.secret_file if found is not None else "",
            tls_directory=found.tls_directory(MeshRole.OPERATOR) if found is not None and has_files else "",
            identity_wait_s=IDENTITY_WAIT_S,
        )


@dataclass(frozen=True, kw_only=True)
class MeshChoice:
    """Which mesh a command shows. Settings that several commands share."""

    mesh: str = setting("", "name of a mesh that `kvmesh up` runs here; needed where there are several")
    consul: str = setting("", "address of the Consul agent; empty: the mesh that `kvmesh up` started here")
    token: str = setting("", "Consul ACL token", secret=True)
    credentials: str = setting(
        "", "folder with the operator's credentials (`kvmesh credentials`); empty: those of the mesh that runs here"
    )

    mesh_identity: IdentitySource = setting(
        IdentitySource.FILES, "as for services: where the operator's certificate comes from"
    )

    def target(self) -> MeshTarget:
        """NotFoundError lists the running meshes if the choice is not clear."""
        return choose_target(
            mesh=self.mesh,
            consul=self.consul,
            token=self.token,
            credentials=self.credentials,
            source=self.mesh_identity,
        )


def choose_target(
    *, mesh: str, consul: str, token: str, credentials: str, source: IdentitySource = IdentitySource.FILES
) -> MeshTarget:
    """Returns the mesh that a command's flags mean. NotFoundError lists the running meshes if the choice is not clear."""
    if consul:
        running = [each for each in running_meshes() if each.registry == consul]
        target = target_of(running[0]) if running else MeshTarget(address=consul)
    else:
        target = target_of(find_mesh(mesh, otherwise="--consul"))
    found = find_credentials(credentials) if credentials else target.credentials
    return MeshTarget(address=target.address, token=token, credentials=found, source=source)


def target_of(state: MeshState) -> MeshTarget:
    """Returns a mesh of this user on this machine."""
    credentials = find_credentials(state.credentials) if state.credentials else None
    return MeshTarget(address=state.registry, credentials=credentials)


@dataclass(frozen=True, kw_only=True)
class _ServiceNetwork(NetworkSettings):
    discovery: DiscoverySettings = group(DiscoverySettings)
    mesh: MeshSettings = group(MeshSettings)


SERVICE_VARIABLES = frozenset(spec.variable for spec in specs(_ServiceNetwork))
"""Variables that a shell has exported for services, which commands ignore without a warning."""


def run_command(
    settings_type: type[S], argv: Sequence[str], act: Callable[[S], int], *, program: str, description: str | None
) -> int:
    """Loads the settings of a command, and returns what `act` does: the exit status. 2 for wrong settings, 1 for a MeshError, printed."""
    try:
        settings = load(
            settings_type,
            argv=argv,
            program=program,
            description=description or "",
            foreign_variables=SERVICE_VARIABLES,
        )
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return act(settings)
    except MeshError as error:
        print(f"kvmesh: {error.message}", file=sys.stderr)
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConnection:
    """An open connection to a mesh."""

    registry: Registry
    channels: ChannelPool

    async def list_workers(self, router: Instance | None = None) -> Sequence[WorkerView]:
        """Returns the workers as a router sees them; None: the first one that is registered. UnavailableError if there is none."""
        routers = [router] if router is not None else (await self.registry.instances(ROUTER)).instances
        if not routers:
            raise UnavailableError("no router is registered", reason="no_router")
        return await GrpcRouterClient(self.channels, routers[0].address).list_workers(timeout_s=CALL_TIMEOUT_S)


@asynccontextmanager
async def connect(target: MeshTarget) -> AsyncIterator[MeshConnection]:
    """Connects to a mesh. Nothing is asked yet."""
    async with target.identity() as identity:
        registry = target.noted_registry(identity)
        channels = ChannelPool(settings=RPC, mesh=identity.source, role_of=identity.book.role_of)
        try:
            yield MeshConnection(registry=registry, channels=channels)
        finally:
            await channels.aclose()
            await registry.aclose()
