"""A router in the process of its frontend: RouterService without a wire between them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import grpc.aio

from kvmesh.discovery.base import ROUTER, Health, Instance, View
from kvmesh.rpc.interceptors import channel_interceptors, server_interceptors
from kvmesh.rpc.memory import MemoryNetwork, MemoryPool
from kvmesh.telemetry import Telemetry

ADDRESS = "hosted:1"


class HostedRouter:
    """What a frontend's link needs of a registry and of channels, where it asks one router in its own process.

    Messages are handed over as they are, by the transport in memory that passes grpc.aio's conformance suite. A part: the
    router is there for the link from `start` on, and its calls end with `aclose`.
    """

    def __init__(self, router_id: str, add_services: Callable[[grpc.aio.Server], None], telemetry: Telemetry) -> None:
        network = MemoryNetwork(keepalive_s=None, is_serialising=False)
        self._server = network.server(ADDRESS, server_interceptors(telemetry))
        add_services(self._server)  # type: ignore[arg-type]  # It has the methods that generated code calls.
        self._pool: MemoryPool = network.pool(channel_interceptors(telemetry))
        self._instance = _instance(router_id)
        self._has_started = asyncio.Event()

    async def start(self) -> None:
        """From now on it is asked."""
        await self._server.start()
        self._has_started.set()

    async def aclose(self) -> None:
        """Ends the link's stream."""
        await self._pool.aclose()
        await self._server.stop(0)

    async def watch(self, service: str) -> AsyncGenerator[View, None]:
        """One router once it has started, and nothing else ever."""
        yield View(service=service, index=1, instances=())
        await self._has_started.wait()
        yield View(service=service, index=2, instances=[self._instance])
        await asyncio.get_running_loop().create_future()

    def channel(self, address: str) -> grpc.aio.Channel:
        """To the router."""
        return self._pool.channel(address)

    def drop(self, address: str) -> Awaitable[None]:
        """Ends the calls."""
        return self._pool.drop(address)


def _instance(router_id: str) -> Instance:
    host, port = ADDRESS.split(":")
    return Instance(
        service=ROUTER,
        instance_id=router_id,
        host=host,
        port=int(port),
        meta={},
        tags=(),
        health=Health.PASSING,
        is_draining=False,
    )
