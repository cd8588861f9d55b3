"""Calls of RouterService for people and tools; requests are placed over `router/link.py`."""

from collections.abc import Sequence
from typing import Any

from grpc.aio import AioRpcError

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1.router_pb2_grpc import RouterServiceStub
from kvmesh.rpc.channels import Channels
from kvmesh.rpc.codec.router import Explanation, WorkerView, from_explanation, from_worker_view
from kvmesh.rpc.status import from_rpc_error

__all__ = ["Explanation", "GrpcRouterClient", "WorkerView"]


class GrpcRouterClient:
    """One router."""

    def __init__(self, channels: Channels, address: str) -> None:
        self._channels = channels
        self._address = address

    async def list_workers(self, *, model: str = "", timeout_s: float) -> Sequence[WorkerView]:
        """The workers as the router sees them, by id."""
        try:
            response = await self._stub().ListWorkers(pb.ListWorkersRequest(model=model), timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        return [from_worker_view(view) for view in response.workers]

    async def explain(self, request_id: str, *, timeout_s: float) -> Explanation:
        """What was weighed for a request. NotFoundError when it has left the router's history."""
        try:
            response = await self._stub().Explain(pb.ExplainRequest(request_id=request_id), timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        return from_explanation(response)

    def _stub(self) -> Any:
        return RouterServiceStub(self._channels.channel(self._address))
