"""The client for asyncio."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random, SystemRandom
from types import TracebackType
from typing import Any, Unpack

import grpc.aio

from kvmesh.client.aio_batches import AsyncBatches
from kvmesh.client.aio_stream import AsyncStream
from kvmesh.client.answer import Answer, gathered
from kvmesh.client.calling import Calling, ChatArguments, GenerateArguments, Messages, StreamingCall, T
from kvmesh.client.settings import ClientSettings
from kvmesh.rpc.codec.client_inference import (
    Embedded,
    ModelInfo,
    Piece,
    detokenize_message,
    embed_message,
    from_embed_response,
    from_models_response,
    inference_stub,
    models_message,
    tokenize_message,
)


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

    async def chat(self, model: str, messages: Messages, **arguments: Unpack[ChatArguments]) -> Answer:
        """A whole answer to a conversation."""
        return await self._whole(self._calling.chat(self._stub, model, messages, arguments=arguments, is_stream=False))

    def chat_stream(self, model: str, messages: Messages, **arguments: Unpack[ChatArguments]) -> AsyncStream[Piece]:
        """The same, in pieces as they arrive."""
        return AsyncStream(
            self._calling, self._calling.chat(self._stub, model, messages, arguments=arguments, is_stream=True)
        )

    async def generate(self, model: str, prompt: str | Sequence[int], **arguments: Unpack[GenerateArguments]) -> Answer:
        """A whole continuation of a text or of token ids."""
        return await self._whole(
            self._calling.generate(self._stub, model, prompt, arguments=arguments, is_stream=False)
        )

    def generate_stream(
        self, model: str, prompt: str | Sequence[int], **arguments: Unpack[GenerateArguments]
    ) -> AsyncStream[Piece]:
        """The same, in pieces as they arrive."""
        return AsyncStream(
            self._calling, self._calling.generate(self._stub, model, prompt, arguments=arguments, is_stream=True)
        )

    async def embed(
        self,
        model: str,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        timeout_s: float | None = None,
    ) -> Embedded:
        """Embeddings of texts or of lists of token ids."""
        message = embed_message(model, inputs, dimensions=dimensions)
        return from_embed_response(await self._one(self._stub.Embed, message, timeout_s))

    async def tokenize(
        self, model: str, text: str | Messages, *, timeout_s: float | None = None, **more: Any
    ) -> list[int]:
        """Token ids of a text, or of a templated conversation. `more`: see `tokenize_message`."""
        return list((await self._one(self._stub.Tokenize, tokenize_message(model, text, **more), timeout_s)).token_ids)

    async def detokenize(
        self, model: str, token_ids: Sequence[int], *, timeout_s: float | None = None, **more: Any
    ) -> str:
        message = detokenize_message(model, token_ids, **more)
        return str((await self._one(self._stub.Detokenize, message, timeout_s)).text)

    async def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """The models that are served now."""
        return from_models_response(await self._one(self._stub.ListModels, models_message(), timeout_s))

    def _stream(
        self, method: Any, message: Any, read: Callable[[Any], T], *, timeout_s: float | None
    ) -> AsyncStream[T]:
        return AsyncStream(self._calling, self._calling.question(method, message, read, timeout_s=timeout_s))

    async def _whole(self, question: StreamingCall[Piece]) -> Answer:
        async with AsyncStream(self._calling, question) as stream:
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
