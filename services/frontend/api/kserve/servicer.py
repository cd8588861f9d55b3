"""GRPCInferenceService: the Open Inference Protocol to the pipeline and back, no decisions."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
    Tensor,
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
from kvmesh.rpc.http_status import http_status
from services.frontend.access.interceptor import rpc_authenticate, rpc_caller
from services.frontend.api.grpc.running import RunningRequest
from services.frontend.api.grpc.stream_writer import ANSWER_UNREAD, StreamWriter
from services.frontend.api.kserve.output_tensors import OutputTensors
from services.frontend.api.kserve.read import INPUTS, OUTPUTS, Inference, read_inference
from services.frontend.api.run import RequestContext, first_failure
from services.frontend.models import ServedModel
from services.frontend.pipeline.pipeline import Pipeline

SERVICE_NAME = "inference.GRPCInferenceService"
STREAM_REQUESTS_MAX = 64
"""Requests in flight of one ModelStreamInfer call; further ones are read as these end. A client that needs more opens another stream."""
_STRICT = "triton_grpc_error"
Context = ServicerContext[Any, Any]
Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]


class KserveServicer(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves clients of Triton and KServe. Raises MeshError, except inside a stream, where failures are messages."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._counts: dict[str, InferCounts] = {}

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        try:
            self._model(request.name, model_version=request.version)
        except (NotFoundError, UnavailableError):
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._is_ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="kvmesh", version=_version())

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        self._model(request.name, model_version=request.version)
        return to_model_metadata(request.name, INPUTS, OUTPUTS)

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        self._model(request.name, model_version=request.version)
        return to_model_config(request.name, INPUTS, OUTPUTS)

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        if request.name:
            names = [self._model(request.name, model_version=request.version).name]
        else:
            caller = rpc_caller.get()
            names = [model.name for model in self._pipeline.models.served() if caller.allows(model.name)]
        return to_model_statistics({name: self._counts.get(name, InferCounts()) for name in names})

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        call = from_infer_request(request)
        inference = self._read(call, context)
        if inference.is_stream:
            raise UnsupportedError("stream must be false here: use ModelStreamInfer", field="parameters.stream")
        async with self._running(inference) as running:
            tensors = OutputTensors(inference, running.prepared)
            updates = [each async for each in running.updates()]
            return to_infer_response(model=call.model, call_id=call.call_id, tensors=tensors.convert(updates))

    async def ModelStreamInfer(  # type: ignore[override]  # it writes, because answers interleave
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        async with StreamWriter(context, unread_timeout_s=self._pipeline.settings.unread_timeout_s) as writer:
            await self._answer_all(requests, context, writer.write)

    async def _answer_all(self, requests: AsyncIterator[pb.ModelInferRequest], context: Context, write: Write) -> None:
        is_strict = (_STRICT, "true") in (context.invocation_metadata() or ())
        room = asyncio.Semaphore(STREAM_REQUESTS_MAX)
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await room.acquire()
                    task = tasks.create_task(self._answer(request, context, write, is_strict=is_strict))
                    task.add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def _answer(self, request: pb.ModelInferRequest, context: Context, write: Write, *, is_strict: bool) -> None:
        try:
            # In this task only. The call may have begun long ago.
            rpc_caller.set(rpc_authenticate.get()())
            await self._stream(from_infer_request(request), context, write)
        except MeshError as error:
            if is_strict or error.reason == ANSWER_UNREAD:
                raise
            code, access = http_status(error)[0], self._pipeline.access
            access.charge_refusal(rpc_caller.get(), code, body_bytes=request.ByteSize())
            await write(to_stream_error(model=request.model_name, call_id=request.id, message=error.message))

    async def _stream(self, call: InferCall, context: Context, write: Write) -> None:
        inference = self._read(call, context)

        async def write_part(tensors: Sequence[Tensor], *, is_final: bool = False) -> None:
            part = to_infer_response(model=call.model, call_id=call.call_id, tensors=tensors, is_final=is_final)
            await write(to_stream_response(part))

        async with self._running(inference) as running:
            tensors = OutputTensors(inference, running.prepared)
            last: Sequence[Tensor] | None = None
            if not inference.is_stream:
                last = tensors.convert([each async for each in running.updates()])
            else:
                open_choices = inference.request.choices
                async for update in running.updates():
                    open_choices -= update.ending is not None
                    last = tensors.convert([update])
                    if open_choices:
                        await write_part(last)
                        last = None
            # The last part is sent after the request has ended, because no failure can be reported to the client after it.
            if last is not None:
                await write_part(last, is_final=not inference.ends_with_empty)
            if inference.ends_with_empty:
                await write_part((), is_final=True)

    def _read(self, call: InferCall, context: Context) -> Inference:
        pipeline = self._pipeline
        return read_inference(call, pipeline.new_id(), remaining_s(context), choices_max=pipeline.settings.choices_max)

    @asynccontextmanager
    async def _running(self, inference: Inference) -> AsyncIterator[RunningRequest]:
        """Runs the request and counts it for ModelStatistics. A request that is refused before it runs is not counted."""
        clock = self._pipeline.clock
        began_wall_s = clock.wall()
        context = RequestContext(
            pipeline=self._pipeline,
            request_id=inference.request.request_id,
            began_s=clock.now(),
            caller=rpc_caller.get(),
        )
        running = RunningRequest(context, inference.request, is_stream=inference.is_stream, path="kserve")
        async with running:
            counts = self._counts.setdefault(running.prepared.model.name, InferCounts())
            counts.last_began_s = began_wall_s
            try:
                yield running
            except BaseException:
                counts.failed += 1
                counts.failed_s += clock.now() - context.began_s
                raise
            counts.answered += 1
            counts.answered_s += clock.now() - context.began_s

    @property
    def _is_ready(self) -> bool:
        return bool(self._pipeline.models.served()) and not self._pipeline.is_draining

    def _model(self, name: str, model_version: str) -> ServedModel:
        check_version(model_version, field="version")
        name = required_text(name, field="name", characters_max=MODEL_CHARACTERS_MAX)
        # First, so that no error discloses a model that the caller may not use.
        rpc_caller.get().check_model(name)
        return self._pipeline.models.find(name)


def _version() -> str:
    try:
        return version("kvmesh")
    except PackageNotFoundError:
        return ""
