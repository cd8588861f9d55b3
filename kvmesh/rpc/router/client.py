"""Clients of RouterService for tools and for other routers; frontends use `link.py`. Failures are raised as MeshError."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from grpc.aio import EOF, AioRpcError

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1.router_pb2_grpc import RouterServiceStub
from kvmesh.core import Explanation, PeerUpdate, RequestList, WorkerView
from kvmesh.core.planning import PlacementBounds
from kvmesh.core.whatif import RecordedBatch
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.codec.peers import from_peer_update, to_peer_update
from kvmesh.rpc.codec.recording import from_recorded
from kvmesh.rpc.codec.router import from_explanation, from_request_list, from_worker_view
from kvmesh.rpc.status import from_rpc_error


class GrpcRouterClient:
    """One router."""

    def __init__(self, channels: ChannelPool, address: str) -> None:
        self._channels = channels
        self._address = address

    async def list_workers(self, *, model: str = "", timeout_s: float) -> Sequence[WorkerView]:
        """Returns the workers as the router sees them, by id."""
        try:
            response = await self._stub().ListWorkers(pb.ListWorkersRequest(model=model), timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        return [from_worker_view(view) for view in response.workers]

    async def explain(self, request_id: str, *, timeout_s: float) -> Explanation:
        """Returns the decision on a request. Raises NotFoundError when it has left the router's history."""
        try:
            response = await self._stub().Explain(pb.ExplainRequest(request_id=request_id), timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        return from_explanation(response)

    async def list_requests(
        self, *, model: str = "", in_flight_only: bool = False, requests_max: int = 0, timeout_s: float
    ) -> RequestList:
        """Returns the newest requests that the router knows, newest first. `requests_max` 0: the router's default."""
        request = pb.ListRequestsRequest(model=model, in_flight_only=in_flight_only, requests_max=requests_max)
        try:
            response = await self._stub().ListRequests(request, timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        return from_request_list(response)

    async def set_bounds(self, model: str, bounds: PlacementBounds, *, fencing_token: int, timeout_s: float) -> None:
        """Sets a model's bounds. UnsupportedError if the planner with this token does not lead."""
        request = pb.SetPlacementBoundsRequest(
            model=model, deflect_tokens=bounds.deflect_tokens, ttft_s=bounds.ttft_s, fencing_token=fencing_token
        )
        try:
            await self._stub().SetPlacementBounds(request, timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error

    async def record_requests(self, salt: bytes) -> AsyncGenerator[RecordedBatch, None]:
        """Yields requests that finish from now on, until the router ends. Closing the generator ends the call."""
        call = self._stub().RecordRequests(pb.RecordRequestsRequest(salt=salt))
        try:
            async for message in call:
                yield from_recorded(message)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        finally:
            call.cancel()

    def _stub(self) -> Any:
        return RouterServiceStub(self._channels.channel(self._address, MeshRole.ROUTER))


class PeerCall:
    """An open SyncPeers stream."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address

    async def send(self, update: PeerUpdate) -> None:
        """Does nothing on a broken stream: `messages` raises the error."""
        try:
            await self._call.write(pb.SyncPeersRequest(update=to_peer_update(update)))
        except (AioRpcError, asyncio.InvalidStateError):
            return

    async def messages(self) -> AsyncGenerator[PeerUpdate, None]:
        """The peer's messages, until it ends the stream. Raises MeshError when the stream breaks."""
        try:
            while (message := await self._call.read()) is not EOF:
                yield from_peer_update(message.update)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address, has_begun=True) from error

    def cancel(self) -> None:
        self._call.cancel()


class GrpcPeersClient:
    """All other routers."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    def open(self, address: str) -> PeerCall:
        """Opens SyncPeers to the router at `address`; `PeerCall.messages` raises if that fails."""
        stub: Any = RouterServiceStub(self._channels.channel(address, MeshRole.ROUTER))
        return PeerCall(stub.SyncPeers(), address)
