"""Runs single legs on workers with `Generate`, for programs that measure a worker."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from grpc.aio import AioRpcError

from kvmesh.api.decode.v1.decode_pb2_grpc import DecodeServiceStub
from kvmesh.api.prefill.v1.prefill_pb2_grpc import PrefillServiceStub
from kvmesh.api.worker.v1 import legs_pb2 as pb
from kvmesh.core import KvHandle, Leg, LegFinish, Role
from kvmesh.errors import LostError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.codec.legs import from_finish, to_leg
from kvmesh.rpc.status import from_rpc_error

STUBS = {Role.PREFILL: PrefillServiceStub, Role.DECODE: DecodeServiceStub}


class PlainLegClient:
    """Failures arrive as MeshError. Cancelling a call ends the leg."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def run(
        self, address: str, role: Role, leg: Leg, *, timeout_s: float
    ) -> AsyncGenerator[int | LegFinish, None]:
        """Yields the number of tokens of each message as it arrives, and at last the finish. Raises the leg's error."""
        stub = STUBS[role](self._channels.channel(address))
        call = stub.Generate(pb.GenerateRequest(leg=to_leg(leg)), timeout=timeout_s)
        try:
            async for message in call:
                if message.token_ids:
                    yield len(message.token_ids)
                if message.HasField("finish"):
                    finish = from_finish(message.finish)
                    if finish.error is not None:
                        raise finish.error
                    yield finish
                    return
        except AioRpcError as error:
            raise from_rpc_error(error, where=address) from error
        finally:
            call.cancel()
        raise LostError("the worker ended the call without a finish", reason="no_finish", where=address)

    async def prefill(self, address: str, leg: Leg, *, timeout_s: float) -> KvHandle:
        """Computes the leg's prompt on a prefill worker. The handle is under its lease."""
        async with aclosing(self.run(address, Role.PREFILL, leg, timeout_s=timeout_s)) as outputs:
            async for output in outputs:
                if isinstance(output, LegFinish) and output.handle is not None:
                    return output.handle
        raise LostError("the prefill worker returned no handle", reason="no_handle", where=address)
