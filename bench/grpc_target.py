"""Load target over native gRPC: InferenceService.Generate or Chat, streaming."""

import time
from collections.abc import AsyncIterable

import grpc.aio

from bench.target import LoadRequest, LoadResult
from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvmesh.api.types.v1.sampling_pb2 import SamplingParams


class GrpcTarget:
    """Sends requests on one channel."""

    def __init__(self, address: str, model: str, *, is_chat: bool = True, timeout_s: float = 120.0) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = InferenceServiceStub(self._channel)
        self._model = model
        self._is_chat = is_chat
        self._timeout_s = timeout_s

    async def send(self, request: LoadRequest, intended_at_s: float) -> LoadResult:
        result = LoadResult()
        options = pb.GenerationOptions(
            stream=True,
            sampling=SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True),
        )
        call: AsyncIterable[pb.ChatResponse | pb.GenerateResponse]
        if self._is_chat:
            message = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=request.prompt)
            call = self._stub.Chat(
                pb.ChatRequest(model=self._model, messages=[message], options=options), timeout=self._timeout_s
            )
        else:
            call = self._stub.Generate(
                pb.GenerateRequest(model=self._model, text=request.prompt, options=options), timeout=self._timeout_s
            )
        last_s = 0.0
        try:
            async for response in call:
                now_s = time.perf_counter()
                if response.text:
                    if not result.chunks:
                        result.ttft_s = now_s - intended_at_s
                    else:
                        result.gaps_s.append(now_s - last_s)
                    result.chunks += 1
                    last_s = now_s
                if response.HasField("usage"):
                    result.prompt_tokens = response.usage.prompt_tokens
                    result.output_tokens = response.usage.output_tokens
                    result.cached_tokens = response.usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            result.error = f"{error.code().name}: {error.details()}"
            return result
        result.total_s = time.perf_counter() - intended_at_s
        if result.output_tokens != request.output_tokens:
            result.error = f"{result.output_tokens} tokens instead of {request.output_tokens}"
        return result

    async def aclose(self) -> None:
        await self._channel.close()
