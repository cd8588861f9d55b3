"""A real grpc.aio server with grpc.health.v1, like every service of the mesh."""

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


class HealthServer:
    """Serves on 127.0.0.1; `stop()` and `start()` keep the port."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.port = 0
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None
        self._servicer = health.aio.HealthServicer()

    async def start(self) -> None:
        self._servicer = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        address = f"127.0.0.1:{self.port}"
        if self._credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self._credentials)
        await self._server.start()
        await self.set_serving(True)

    async def set_serving(self, is_serving: bool) -> None:
        kinds = health_pb2.HealthCheckResponse
        await self._servicer.set("", kinds.SERVING if is_serving else kinds.NOT_SERVING)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
