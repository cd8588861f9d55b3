"""Health, reflection and channelz."""

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_channelz.v1 import channelz
from grpc_channelz.v1.channelz_pb2_grpc import add_ChannelzServicer_to_server
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

CHANNELZ = "grpc.channelz.v1.Channelz"
HEALTH = "grpc.health.v1.Health"
REFLECTION_ALPHA = "grpc.reflection.v1alpha.ServerReflection"
REFLECTION = "grpc.reflection.v1.ServerReflection"


class GrpcHealth:
    """grpc.health.v1 for the whole server ("") and each of its services, all with the same state."""

    def __init__(self, service_names: Sequence[str], *, is_serving: bool = False) -> None:
        self._names = ("", *service_names)
        self._is_serving = is_serving
        self._servicer = health.aio.HealthServicer()

    @property
    def is_serving(self) -> bool:
        """The state that was sent to watchers last."""
        return self._is_serving

    async def add_to(self, server: Any) -> None:
        await self.set_serving(self._is_serving)
        add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, is_serving: bool) -> None:
        """Sends the state to all watchers. Not serving: clients send no new requests; those in flight continue."""
        self._is_serving = is_serving
        states = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._servicer.set(name, states.SERVING if is_serving else states.NOT_SERVING)

    async def close(self) -> None:
        """Sends NOT_SERVING to all watchers. Ignores states that are set later."""
        self._is_serving = False
        await self._servicer.enter_graceful_shutdown()


def add_reflection(service_names: Sequence[str], server: Any) -> None:
    """Adds reflection in both versions, which differ only in the package's name; new clients use v1."""
    servicer: Any = reflection.aio.ReflectionServicer((*service_names, HEALTH, REFLECTION_ALPHA))
    add: Any = add_ServerReflectionServicer_to_server
    add(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=ServerReflectionRequest.FromString,
        response_serializer=ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(REFLECTION, {"ServerReflectionInfo": handler}),)
    )


def add_channelz(server: Any) -> None:
    servicer: Any = channelz.aio.ChannelzServicer()
    add_ChannelzServicer_to_server(servicer, server)
