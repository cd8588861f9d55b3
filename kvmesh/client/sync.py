"""The client that blocks."""

import time
from collections.abc import Callable, Mapping, Sequence
from random import Random, SystemRandom
from types import TracebackType
from typing import Any

import grpc

from kvmesh.client.answer import Answer, gathered
from kvmesh.client.calling import Calling, Question, T, with_sampling
from kvmesh.client.settings import ClientSettings
from kvmesh.client.sync_batches import Batches
from kvmesh.client.sync_stream import Stream
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

    def chat(
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
        return self._whole(self._stream(self._stub.Chat, message, from_chat_response, timeout_s))

    def chat_stream(
        self,
        model: str,
        messages: Messages,
        *,
        sampling: SamplingParams | None = None,
        options: Options | None = None,
        timeout_s: float | None = None,
        **more: Any,
    ) -> Stream[Piece]:
        """The answer as it comes."""
        message = chat_message(model, messages, with_sampling(options, sampling, is_stream=True), **more)
        return self._stream(self._stub.Chat, message, from_chat_response, timeout_s)

    def generate(
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
        return self._whole(self._stream(self._stub.Generate, message, from_generate_response, timeout_s))

    def generate_stream(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        options: Options | None = None,
        timeout_s: float | None = None,
        **more: Any,
    ) -> Stream[Piece]:
        """The continuation as it comes."""
        message = generate_message(model, prompt, with_sampling(options, sampling, is_stream=True), **more)
        return self._stream(self._stub.Generate, message, from_generate_response, timeout_s)

    def embed(
        self,
        model: str,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        timeout_s: float | None = None,
    ) -> Embedded:
        """Vectors of texts or of lists of token ids."""
        message = embed_message(model, inputs, dimensions=dimensions)
        return from_embed_response(self._one(self._stub.Embed, message, timeout_s))

    def tokenize(self, model: str, text: str | Messages, *, timeout_s: float | None = None, **more: Any) -> list[int]:
        """Tokens of a text, or of a conversation as the model would see it. `more`: see `tokenize_message`."""
        return list((self._one(self._stub.Tokenize, tokenize_message(model, text, **more), timeout_s)).token_ids)

    def detokenize(self, model: str, token_ids: Sequence[int], *, timeout_s: float | None = None, **more: Any) -> str:
        """The text of tokens."""
        message = detokenize_message(model, token_ids, **more)
        return str((self._one(self._stub.Detokenize, message, timeout_s)).text)

    def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """Models that can be asked now."""
        return from_models_response(self._one(self._stub.ListModels, models_message(), timeout_s))

    def _stream(self, method: Any, message: Any, read: Callable[[Any], T], timeout_s: float | None) -> Stream[T]:
        deadline_s = self._calling.deadline_s(timeout_s)
        return Stream(self._calling, Question(method=method, message=message, read=read, deadline_s=deadline_s))

    def _whole(self, stream: Stream[Piece]) -> Answer:
        with stream:
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
