"""The batch methods of InferenceService: protobuf to the store and back, no decisions."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from grpc.aio import ServicerContext

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1 import inference_pb2_grpc
from kvmesh.errors import InvalidRequestError, NotFoundError
from kvmesh.rpc.codec.batch import batch_id_of, from_create_batch, to_batch, to_batch_result
from services.frontend.access.interceptor import rpc_caller
from services.frontend.api.batches.line_runner import ENDPOINTS
from services.frontend.api.batches.service import BatchService
from services.frontend.stores.batch_rows import batch_body
from services.frontend.stores.database import Row

PAGE_DEFAULT, PAGE_MAX = 20, 100
Context = ServicerContext[Any, Any]


class BatchServicer(inference_pb2_grpc.InferenceServiceServicer):
    """A tenant's batches are those that it created, here or over HTTP. `batches` returns None if they are off."""

    def __init__(self, batches: Callable[[], BatchService | None]) -> None:
        self._batches = batches

    async def CreateBatch(self, request: pb.CreateBatchRequest, context: Context) -> pb.CreateBatchResponse:
        service = self._service
        row = await service.create_from_call(_owner(), from_create_batch(request, lines_max=service.lines_max))
        return pb.CreateBatchResponse(batch=_batch(row))

    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        return pb.GetBatchResponse(
            batch=_batch(await self._service.store.get(owner=_owner(), batch_id=batch_id_of(request)))
        )

    async def ListBatches(self, request: pb.ListBatchesRequest, context: Context) -> pb.ListBatchesResponse:
        if request.page_size > PAGE_MAX:
            raise InvalidRequestError(f"page_size must be at most {PAGE_MAX}", field="page_size")
        rows, has_more = await self._service.store.page(
            _owner(), limit=request.page_size or PAGE_DEFAULT, after=request.after or None, endpoints=ENDPOINTS
        )
        return pb.ListBatchesResponse(batches=[_batch(row) for row in rows], has_more=has_more)

    async def CancelBatch(self, request: pb.CancelBatchRequest, context: Context) -> pb.CancelBatchResponse:
        return pb.CancelBatchResponse(batch=_batch(await self._service.cancel(_owner(), batch_id=batch_id_of(request))))

    async def ListBatchResults(
        self, request: pb.ListBatchResultsRequest, context: Context
    ) -> AsyncIterator[pb.ListBatchResultsResponse]:
        async with aclosing(self._service.results(_owner(), batch_id_of(request))) as results:
            async for result in results:
                yield to_batch_result(result)

    @property
    def _service(self) -> BatchService:
        service = self._batches()
        if service is None:
            raise NotFoundError("this frontend has no store for files and batches", reason="batches_off")
        return service


def _owner() -> str:
    return rpc_caller.get().tenant


def _batch(row: Row) -> pb.Batch:
    return to_batch(batch_body(row), created_s=row["created_s"], expires_s=row["expires_s"])
