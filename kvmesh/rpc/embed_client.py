"""Calls DecodeService.Embed over pooled channels."""

from typing import Any

from grpc import StatusCode
from grpc.aio import AioRpcError

from kvmesh.api.decode.v1.decode_pb2_grpc import DecodeServiceStub
from kvmesh.core import WorkerRef
from kvmesh.errors import InternalError
from kvmesh.rpc.channels import Channels
from kvmesh.rpc.clients import EmbedCall, EmbedResult
from kvmesh.rpc.codec.embed import from_embed_response, to_embed_request
from kvmesh.rpc.status import from_rpc_error


class GrpcEmbedClient:
    """Implements `kvmesh.rpc.clients.EmbedClient`."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def embed(self, worker: WorkerRef, call: EmbedCall, *, timeout_s: float) -> EmbedResult:
        """All vectors; see the protocol."""
        stub: Any = DecodeServiceStub(self._channels.channel(worker.address))
        try:
            response = await stub.Embed(to_embed_request(call), timeout=timeout_s)
        except AioRpcError as error:
            has_begun = error.code() is not StatusCode.UNAVAILABLE
            raise from_rpc_error(error, where=worker.worker_id, has_begun=has_begun) from error
        result = from_embed_response(response)
        if len(result.vectors) != len(call.inputs):
            raise InternalError(f"{len(result.vectors)} vectors for {len(call.inputs)} inputs", where=worker.worker_id)
        return result
