"""GRPCInferenceService: the Open Inference Protocol to the pipeline and back, no decisions."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from grpc.aio import ServicerContext

from kvmesh.api.inference import grpc_service_pb2 as pb
from kvmesh.api.inference import grpc_service_pb2_grpc
from kvmesh.errors import MeshError, NotFoundError, UnavailableError, UnsupportedError
from kvmesh.rpc.codec.kserve import (
    MODEL_CHARACTERS_MAX,
    InferCall,
    InferCounts,
    check_version,
    from_infer_request,
    to_infer_response,
    to_model_config,
    to_model_metadata,
    to_model_statistics,
    to_stream_error,
    to_stream_response,
)
from kvmesh.rpc.codec.scalars import required_text
from kvmesh.rpc.deadline import remaining_s
from services.frontend.access.caller import current_caller
from services.frontend.api.grpc.running import RunningRequest
from services.frontend.api.kserve.read import INPUTS, OUTPUTS, Inference, read_inference
from services.frontend.api.kserve.settings import KserveSettings
from services.frontend.api.kserve.tensors import Tensors
from services.frontend.api.kserve.writer import StreamWriter
from services.frontend.models import ServedModel
from services.frontend.pipeline.pipeline import Pipeline

SERVICE_NAME = "inference.GRPCInferenceService"
_STRICT = "triton_grpc_error"
Context = ServicerContext[Any, Any]
Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]


class KserveServicer(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves clients of Triton and KServe. Failures leave as MeshError but for those inside a stream."""

    def __init__(self, pipeline: Pipeline, settings: KserveSettings) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._counts: dict[str, InferCounts] = {}

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        try:
            self._model(request.name, request.version)
        except (NotFoundError, UnavailableError):
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._is_ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="kvmesh", version=_version())

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        self._model(request.name, request.version)
        return to_model_metadata(request.name, INPUTS, OUTPUTS)

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        self._model(request.name, request.version)
        return to_model_config(request.name, INPUTS, OUTPUTS)

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        if request.name:
            names = [self._model(request.name, request.version).name]
        else:
            caller = current_caller.get()
            names = [model.name for model in self._pipeline.models.served() if caller.allows(model.name)]
        return to_model_statistics({name: self._counts.get(name, InferCounts()) for name in names})

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        call = from_infer_request(request)
        inference = self._read(call, context)
        if inference.is_stream:
            raise UnsupportedError("stream must be false here: ask ModelStreamInfer", field="parameters.stream")
        async with self._running(inference) as running:
            tensors = Tensors(inference, running.prepared)
            updates = [each async for each in running.updates()]
            return to_infer_response(call.model, call.call_id, tensors.of(updates))

    async def ModelStreamInfer(  # type: ignore[override]  # it writes: answers of several requests come mixed
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        is_strict = (_STRICT, "true") in (context.invocation_metadata() or ())
        room = asyncio.Semaphore(self._settings.stream_requests_max)
        writer = StreamWriter(context)
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await room.acquire()
                    task = tasks.create_task(self._answer(request, context, writer.write, is_strict=is_strict))
                    task.add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as failures:
            await writer.settle()
            raise _first(failures) from None

    async def _answer(self, request: pb.ModelInferRequest, context: Context, write: Write, *, is_strict: bool) -> None:
        try:
            await self._stream(from_infer_request(request), context, write)
        except MeshError as error:
            if is_strict:
                raise
            await write(to_stream_error(request.model_name, request.id, error.message))

    async def _stream(self, call: InferCall, context: Context, write: Write) -> None:
        inference = self._read(call, context)
        async with self._running(inference) as running:
            tensors = Tensors(inference, running.prepared)
            if not inference.is_stream:
                waiting = [tensors.of([each async for each in running.updates()])]
            else:
                waiting = []
                left = inference.request.choices
                async for update in running.updates():
                    left -= update.ending is not None
                    waiting = [tensors.of([update])]
                    if left:
                        await write(to_stream_response(self._part(call, waiting.pop(), is_final=False)))
            # The last part waits for the request's end: a failure after it would come too late to be told.
            for last in waiting:
                is_final = not inference.ends_with_empty
                await write(to_stream_response(self._part(call, last, is_final=is_final)))
            if inference.ends_with_empty:
                await write(to_stream_response(to_infer_response(call.model, call.call_id, (), is_final=True)))

    def _part(self, call: InferCall, tensors: Any, *, is_final: bool) -> pb.ModelInferResponse:
        return to_infer_response(call.model, call.call_id, tensors, is_final=is_final)

    def _read(self, call: InferCall, context: Context) -> Inference:
        pipeline = self._pipeline
        return read_inference(call, pipeline.new_id(), remaining_s(context), pipeline.settings.choices_max)

    @asynccontextmanager
    async def _running(self, inference: Inference) -> AsyncIterator[RunningRequest]:
        """Runs the request and counts it for ModelStatistics. A request that is refused before it runs is not counted."""
        clock = self._pipeline.clock
        began_s, began_wall_s = clock.now(), clock.wall()
        running = RunningRequest(
            self._pipeline, inference.request, is_stream=inference.is_stream, began_s=began_s, path="kserve"
        )
        async with running:
            counts = self._counts.setdefault(running.prepared.model.name, InferCounts())
            counts.last_began_s = began_wall_s
            try:
                yield running
            except BaseException:
                counts.failed += 1
                counts.failed_s += clock.now() - began_s
                raise
            counts.answered += 1
            counts.answered_s += clock.now() - began_s

    @property
    def _is_ready(self) -> bool:
        return bool(self._pipeline.models.served()) and not self._pipeline.is_draining

    def _model(self, name: str, model_version: str) -> ServedModel:
        check_version(model_version, "version")
        model = self._pipeline.models.find(required_text(name, "name", MODEL_CHARACTERS_MAX))
        current_caller.get().check_model(model.adapter or model.name)
        return model


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """What failed first: the rest is what it brought down."""
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


def _version() -> str:
    try:
        return version("kvmesh")
    except PackageNotFoundError:
        return ""
