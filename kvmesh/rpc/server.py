"""A gRPC server as a running part of a process."""

import asyncio
from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from kvmesh.event_log import event_logger
from kvmesh.identity.certificates import CertificateSource
from kvmesh.network.names import host_port
from kvmesh.rpc.health import CHANNELZ, GrpcHealth, add_channelz, add_reflection
from kvmesh.rpc.settings import RpcSettings, server_credentials, server_options

_log = event_logger(__name__)


class RpcServer:
    """Serves the given services with health and reflection, and with channelz unless its clients are outside of the mesh.

    1. Between `start` and `set_serving(True)` it serves calls, but its health is NOT_SERVING, so the registry sends it no clients.
    2. `aclose` sets NOT_SERVING, refuses new calls, waits `grace_s` for calls in flight, and cancels the rest.
    """

    def __init__(
        self,
        settings: RpcSettings,
        *,
        service_names: Sequence[str],
        add_services: Callable[[grpc.aio.Server], None],
        interceptors: Sequence["grpc.aio.ServerInterceptor"] = (),
        mesh: CertificateSource | None = None,
    ) -> None:
        """`mesh`: mesh TLS; give `server_interceptors` it too, so that methods check the caller's role."""
        self._settings = settings
        self._service_names = tuple(service_names)
        self._add_services = add_services
        self._interceptors = tuple(interceptors)
        self._mesh = mesh
        self._health = GrpcHealth(service_names)
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._credentials: grpc.ServerCredentials | None = None
        """Kept, because gRPC calls it for each handshake."""

    @property
    def port(self) -> int:
        """The port listened on; 0 before `start`."""
        return self._port

    @property
    def address(self) -> str:
        return host_port(self._settings.listen_host, self._port)

    @property
    def is_serving(self) -> bool:
        """The health that was sent to watchers last."""
        return self._health.is_serving

    async def start(self) -> None:
        """Binds and serves. OSError when the address cannot be bound or a TLS file cannot be read."""
        server = grpc.aio.server(interceptors=self._interceptors, options=server_options(self._settings))
        self._add_services(server)
        await self._health.add_to(server)
        names = self._service_names
        if self._settings.has_channelz:
            add_channelz(server)
            names = (*names, CHANNELZ)
        add_reflection(names, server)
        self._port = self._bind(server)
        await server.start()
        self._server = server
        _log.info("rpc_server_started", address=self.address, tls=self._credentials is not None)

    async def set_serving(self, is_serving: bool) -> None:
        """Sets the health that watchers see."""
        await self._health.set_serving(is_serving)

    async def aclose(self) -> None:
        """Stops with grace. Idempotent. If it is cancelled, the stop continues without grace."""
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.close()
        try:
            await server.stop(self._settings.grace_s)
        except asyncio.CancelledError:
            await server.stop(0)
            raise

    def _bind(self, server: grpc.aio.Server) -> int:
        address = host_port(self._settings.listen_host, self._settings.port)
        credentials = self._credentials = server_credentials(self._settings, self._mesh)
        try:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            # gRPC's message names neither the address nor the likely cause.
            raise OSError(f"cannot listen on {address}: is the port in use?") from error
