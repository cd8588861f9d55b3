"""Opens RouterService.SyncPeers on another router. Failures arrive as MeshError, never as RpcError."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from grpc.aio import EOF, AioRpcError

from kvmesh.api.router.v1.router_pb2_grpc import RouterServiceStub
from kvmesh.core import PeerNews
from kvmesh.rpc.channels import Channels
from kvmesh.rpc.codec.peers import from_sync, to_sync_request
from kvmesh.rpc.status import from_rpc_error


class PeerCall:
    """One stream. It is open from the start; what it breaks is known when it is read."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address

    async def send(self, news: PeerNews) -> None:
        """Says something. After the stream broke this does nothing: the reader tells everybody."""
        try:
            await self._call.write(to_sync_request(news))
        except (AioRpcError, asyncio.InvalidStateError):
            return

    async def messages(self) -> AsyncGenerator[PeerNews, None]:
        """What the peer says, until it ends the stream. Raises MeshError when the stream breaks."""
        try:
            while (message := await self._call.read()) is not EOF:
                yield from_sync(message)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address, has_begun=True) from error

    def cancel(self) -> None:
        """Ends the stream. Idempotent."""
        self._call.cancel()


class GrpcPeersClient:
    """One client for all routers."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    def open(self, address: str) -> PeerCall:
        """A stream to the router at `address`."""
        stub: Any = RouterServiceStub(self._channels.channel(address))
        return PeerCall(stub.SyncPeers(), address)
