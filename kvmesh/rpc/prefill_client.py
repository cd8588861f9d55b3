"""Runs single prefill legs on prefill workers."""

from typing import Any

from grpc.aio import AioRpcError

from kvmesh.api.prefill.v1.prefill_pb2_grpc import PrefillServiceStub
from kvmesh.api.worker.v1 import legs_pb2 as pb
from kvmesh.core import KvHandle, Leg
from kvmesh.errors import LostError
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.codec.legs import from_finish, to_leg
from kvmesh.rpc.status import from_rpc_error


class GrpcPrefillClient:
    """Calls PrefillService over pooled channels. Failures arrive as MeshError."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def prefill(self, address: str, leg: Leg, *, timeout_s: float) -> KvHandle:
        """Computes the leg's prompt there and returns the handle. After a failure or a cancel the handle may exist: call `release`."""
        call = self._stub(address).Generate(pb.GenerateRequest(leg=to_leg(leg)), timeout=timeout_s)
        try:
            async for message in call:
                if message.HasField("finish"):
                    finish = from_finish(message.finish)
                    if finish.error is not None:
                        raise finish.error
                    if finish.handle is not None:
                        return finish.handle
        except AioRpcError as error:
            raise from_rpc_error(error, where=address) from error
        finally:
            call.cancel()
        raise LostError("the prefill worker returned no handle", reason="no_handle", where=address)

    async def release(self, address: str, leg_id: str, *, timeout_s: float) -> None:
        """Frees the blocks of the handle that a leg made, if it is not pulled, and ends the leg if it runs."""
        try:
            await self._stub(address).ReleaseKv(pb.ReleaseKvRequest(leg_id=leg_id), timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=address) from error

    def reconnect(self, address: str) -> None:
        """Makes the next call open a new connection. A connection from before a network failure may hang for long after it."""
        self._channels.drop(address)

    def _stub(self, address: str) -> Any:
        return PrefillServiceStub(self._channels.channel(address, MeshRole.PREFILL))
