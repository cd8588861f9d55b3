"""The client for asyncio."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random, SystemRandom
from types import TracebackType
from typing import Any

import grpc.aio

from kvmesh.client.aio_batches import AsyncBatches
from kvmesh.client.aio_stream import AsyncStream
from kvmesh.client.answer import Answer, gathered
from kvmesh.client.calling import Calling, Question, T, with_sampling
from kvmesh.client.settings import ClientSettings
from kvmesh.core import SamplingParams
from kvmesh.rpc.codec.asking import (
    Embedded,
    ModelInfo,
    Piece,
    chat_message,
    detokenize_message,
    embed_message,
    from_chat_response,
    from_embed_response,
    from_generate_response,
    from_models_response,
    generate_message,
    inference_stub,
    models_message,
    tokenize_message,
)
from kvmesh.rpc.codec.inference import Options

Messages = Sequence[Mapping[str, Any]]


class AsyncClient:
    """One channel to a frontend's gRPC address. `generator` draws the jitter of pauses between tries."""

    def __init__(
        self, address: str, settings: ClientSettings | None = None, *, generator: Random | None = None
    ) -> None:
        settings = settings or ClientSettings()
        generator = generator or Random(SystemRandom().getrandbits(128))
        self._calling = Calling(address=address, settings=settings, generator=generator)
        credentials, options = settings.credentials(), settings.options()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._stub = inference_stub(self._channel)
        self.batches = AsyncBatches(self._stub, self._one, self._stream)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, kind: object, error: object, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        await self._channel.close(None)

    async def chat(
        self,
        model: str,
        messages: Messages,
        *,
        sampling: SamplingParams | None = None,
        options: Options | None = None,
        timeout_s: float | None = None,
        **more: Any,
    ) -> Answer:
        """A whole answer to a conversation. `more`: see `chat_message`, such as tools and tool_choice."""
        message = chat_message(model, messages, with_sampling(options, sampling, is_stream=False), **more)
        return await self._whole(self._stream(self._stub.Chat, message, from_chat_response, timeout_s))

    def chat_stream(
        self,
        model: str,
        messages: Messages,
        *,
        sampling: SamplingParams | None = None,
        options: Options | None = None,
        timeout_s: float | None = None,
        **more: Any,
    ) -> AsyncStream[Piece]:
        """The answer as it comes."""
        message = chat_message(model, messages, with_sampling(options, sampling, is_stream=True), **more)
        return self._stream(self._stub.Chat, message, from_chat_response, timeout_s)

    async def generate(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        options: Options | None = None,
        timeout_s: float | None = None,
        **more: Any,
    ) -> Answer:
        """A whole continuation of a text or of token ids. `more`: see `generate_message`."""
        message = generate_message(model, prompt, with_sampling(options, sampling, is_stream=False), **more)
        return await self._whole(self._stream(self._stub.Generate, message, from_generate_response, timeout_s))

    def generate_stream(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        options: Options | None = None,
        timeout_s: float | None = None,
        **more: Any,
    ) -> AsyncStream[Piece]:
        """The continuation as it comes."""
        message = generate_message(model, prompt, with_sampling(options, sampling, is_stream=True), **more)
        return self._stream(self._stub.Generate, message, from_generate_response, timeout_s)

    async def embed(
        self,
        model: str,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        timeout_s: float | None = None,
    ) -> Embedded:
        """Vectors of texts or of lists of token ids."""
        message = embed_message(model, inputs, dimensions=dimensions)
        return from_embed_response(await self._one(self._stub.Embed, message, timeout_s))

    async def tokenize(
        self, model: str, text: str | Messages, *, timeout_s: float | None = None, **more: Any
    ) -> list[int]:
        """Tokens of a text, or of a conversation as the model would see it. `more`: see `tokenize_message`."""
        return list((await self._one(self._stub.Tokenize, tokenize_message(model, text, **more), timeout_s)).token_ids)

    async def detokenize(
        self, model: str, token_ids: Sequence[int], *, timeout_s: float | None = None, **more: Any
    ) -> str:
        """The text of tokens."""
        message = detokenize_message(model, token_ids, **more)
        return str((await self._one(self._stub.Detokenize, message, timeout_s)).text)

    async def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """Models that can be asked now."""
        return from_models_response(await self._one(self._stub.ListModels, models_message(), timeout_s))

    def _stream(self, method: Any, message: Any, read: Callable[[Any], T], timeout_s: float | None) -> AsyncStream[T]:
        deadline_s = self._calling.deadline_s(timeout_s)
        return AsyncStream(self._calling, Question(method=method, message=message, read=read, deadline_s=deadline_s))

    async def _whole(self, stream: AsyncStream[Piece]) -> Answer:
        async with stream:
            return gathered([piece async for piece in stream])

    async def _one(self, method: Any, message: Any, timeout_s: float | None, *, is_repeatable: bool = True) -> Any:
        calling = self._calling
        deadline_s = calling.deadline_s(timeout_s)
        attempt = 0
        while True:
            try:
                return await calling.begin(method, message, deadline_s)
            except grpc.aio.AioRpcError as error:
                wait_s = calling.next_wait_s(error, attempt, deadline_s, is_repeatable=is_repeatable)
            await asyncio.sleep(wait_s)
            attempt += 1
