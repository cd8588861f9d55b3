"""The client that blocks."""

import time
from collections.abc import Callable, Sequence
from random import Random, SystemRandom
from types import TracebackType
from typing import Any, Unpack

import grpc

from kvmesh.client.answer import Answer, gathered
from kvmesh.client.calling import Calling, ChatArguments, GenerateArguments, Messages, StreamingCall, T
from kvmesh.client.settings import ClientSettings
from kvmesh.client.sync_batches import Batches
from kvmesh.client.sync_stream import Stream
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


class Client:
    """One channel to a frontend's gRPC address; threads may share it. `generator` draws the jitter of pauses between tries."""

    def __init__(
        self, address: str, settings: ClientSettings | None = None, *, generator: Random | None = None
    ) -> None:
        settings = settings or ClientSettings()
        generator = generator or Random(SystemRandom().getrandbits(128))
        self._calling = Calling(address=address, settings=settings, generator=generator)
        credentials, options = settings.credentials(), settings.options()
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._stub = inference_stub(self._channel)
        self.batches = Batches(self._stub, self._one, self._stream)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: object, error: object, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        self._channel.close()

    def chat(self, model: str, messages: Messages, **arguments: Unpack[ChatArguments]) -> Answer:
        """A whole answer to a conversation."""
        return self._whole(self._calling.chat(self._stub, model, messages, arguments=arguments, is_stream=False))

    def chat_stream(self, model: str, messages: Messages, **arguments: Unpack[ChatArguments]) -> Stream[Piece]:
        """The same, in pieces as they arrive."""
        return Stream(
            self._calling, self._calling.chat(self._stub, model, messages, arguments=arguments, is_stream=True)
        )

    def generate(self, model: str, prompt: str | Sequence[int], **arguments: Unpack[GenerateArguments]) -> Answer:
        """A whole continuation of a text or of token ids."""
        return self._whole(self._calling.generate(self._stub, model, prompt, arguments=arguments, is_stream=False))

    def generate_stream(
        self, model: str, prompt: str | Sequence[int], **arguments: Unpack[GenerateArguments]
    ) -> Stream[Piece]:
        """The same, in pieces as they arrive."""
        return Stream(
            self._calling, self._calling.generate(self._stub, model, prompt, arguments=arguments, is_stream=True)
        )

    def embed(
        self,
        model: str,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        timeout_s: float | None = None,
    ) -> Embedded:
        """Embeddings of texts or of lists of token ids."""
        message = embed_message(model, inputs, dimensions=dimensions)
        return from_embed_response(self._one(self._stub.Embed, message, timeout_s))

    def tokenize(self, model: str, text: str | Messages, *, timeout_s: float | None = None, **more: Any) -> list[int]:
        """Token ids of a text, or of a templated conversation. `more`: see `tokenize_message`."""
        return list((self._one(self._stub.Tokenize, tokenize_message(model, text, **more), timeout_s)).token_ids)

    def detokenize(self, model: str, token_ids: Sequence[int], *, timeout_s: float | None = None, **more: Any) -> str:
        message = detokenize_message(model, token_ids, **more)
        return str((self._one(self._stub.Detokenize, message, timeout_s)).text)

    def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """The models that are served now."""
        return from_models_response(self._one(self._stub.ListModels, models_message(), timeout_s))

    def _stream(self, method: Any, message: Any, read: Callable[[Any], T], *, timeout_s: float | None) -> Stream[T]:
        return Stream(self._calling, self._calling.question(method, message, read, timeout_s=timeout_s))

    def _whole(self, question: StreamingCall[Piece]) -> Answer:
        with Stream(self._calling, question) as stream:
            return gathered(stream)

    def _one(self, method: Any, message: Any, timeout_s: float | None, *, is_repeatable: bool = True) -> Any:
        calling = self._calling
        deadline_s = calling.deadline_s(timeout_s)
        attempt = 0
        while True:
            try:
                return calling.begin(method, message, deadline_s)
            except grpc.RpcError as error:
                wait_s = calling.next_wait_s(error, attempt, deadline_s, is_repeatable=is_repeatable)
            time.sleep(wait_s)
            attempt += 1
