"""Calls PrefillService over pooled channels."""

from typing import Any

from grpc import StatusCode
from grpc.aio import AioRpcError

from kvmesh.api.prefill.v1 import prefill_pb2 as pb
from kvmesh.api.prefill.v1.prefill_pb2_grpc import PrefillServiceStub
from kvmesh.core import Generation, Rendezvous, WorkerRef
from kvmesh.rpc.channels import Channels
from kvmesh.rpc.clients import PrefillResult
from kvmesh.rpc.codec.legs import from_prefill_response
from kvmesh.rpc.codec.types import to_generation, to_rendezvous
from kvmesh.rpc.status import from_rpc_error


class GrpcPrefillClient:
    """Implements `kvmesh.rpc.clients.PrefillClient`."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    def _stub(self, worker: WorkerRef) -> Any:
        return PrefillServiceStub(self._channels.channel(worker.address))

    async def prefill(
        self,
        worker: WorkerRef,
        *,
        request_id: str,
        generation: Generation,
        timeout_s: float,
        rendezvous: Rendezvous | None = None,
        reservation_id: str = "",
    ) -> PrefillResult:
        """Computes a prompt; see the protocol."""
        request = pb.PrefillRequest(
            request_id=request_id,
            generation=to_generation(generation),
            rendezvous=None if rendezvous is None else to_rendezvous(rendezvous),
            reservation_id=reservation_id,
        )
        try:
            return from_prefill_response(await self._stub(worker).Prefill(request, timeout=timeout_s))
        except AioRpcError as error:
            # A server that stops cancels what is left: lost work, not a caller's cancel. A refused connection did nothing.
            has_begun = error.code() is not StatusCode.UNAVAILABLE
            raise from_rpc_error(error, where=worker.worker_id, has_begun=has_begun) from error

    async def release_kv(self, worker: WorkerRef, handle_id: str, *, timeout_s: float) -> None:
        """Gives a handle back; see the protocol."""
        try:
            await self._stub(worker).ReleaseKv(pb.ReleaseKvRequest(handle_id=handle_id), timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=worker.worker_id) from error
