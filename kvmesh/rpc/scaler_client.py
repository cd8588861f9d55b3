"""Calls an external scaler. Failures are raised as MeshError."""

from collections.abc import Sequence
from typing import Any

from grpc.aio import AioRpcError

from kvmesh.api.planner.v1 import scaler_pb2 as pb
from kvmesh.api.planner.v1.scaler_pb2_grpc import ScalerServiceStub
from kvmesh.core.planning import PoolState, PoolTarget
from kvmesh.errors import InvalidRequestError, UnavailableError
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.codec.scaler import from_pools, to_scale_request
from kvmesh.rpc.status import from_rpc_error


class GrpcScalerClient:
    """One scaler."""

    def __init__(self, channels: ChannelPool, address: str) -> None:
        self._channels = channels
        self._address = address

    async def scale(self, target: PoolTarget, *, fencing_token: int, timeout_s: float) -> int:
        """Sets a pool's size. Returns the number of workers that will run, within the scaler's limits."""
        request = to_scale_request(target, fencing_token)
        try:
            response = await self._stub().Scale(request, timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        return int(response.workers)

    async def list_pools(self, *, timeout_s: float) -> Sequence[PoolState]:
        """Returns the pools that the scaler manages."""
        try:
            return from_pools(await self._stub().ListPools(pb.ListPoolsRequest(), timeout=timeout_s))
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        except InvalidRequestError as error:
            raise UnavailableError(
                f"the scaler's answer is invalid: {error.message}", reason="bad_answer", where=self._address
            ) from error

    def _stub(self) -> Any:
        return ScalerServiceStub(self._channels.channel(self._address, MeshRole.SCALER))
