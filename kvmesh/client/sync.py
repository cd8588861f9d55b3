"""The client that blocks."""

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from random import Random, SystemRandom
from types import TracebackType
from typing import Any, Generic, Unpack

import grpc

from kvmesh.client.answer import Answer, gathered
from kvmesh.client.calling import Calling, ChatArguments, GenerateArguments, Messages, StreamingCall, T
from kvmesh.client.settings import ClientSettings
from kvmesh.errors import CancelledByCallerError, DeadlineError
from kvmesh.rpc.codec.client_batches import (
    Batch,
    BatchAnswer,
    batch_results_message,
    cancel_batch_message,
    create_batch_message,
    from_batch,
    from_batch_result,
    get_batch_message,
    list_batches_message,
)
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
from kvmesh.rpc.status import from_rpc_error


class Stream(Generic[T]):
    """The pieces of an answer as they arrive. Leaving it (`with`), `close` or `cancel` stops the request on the mesh.

    The last piece of an answer has its usage. Raises MeshError on failure; a call that has returned nothing yet is retried first.
    """

    def __init__(self, calling: Calling, question: StreamingCall[T]) -> None:
        self._calling = calling
        self._question = question
        self._call: Any = None
        self._cancelled = threading.Event()
        self._pieces = self._run()

    def __iter__(self) -> "Stream[T]":
        return self

    def __next__(self) -> T:
        return next(self._pieces)

    def __enter__(self) -> "Stream[T]":
        return self

    def __exit__(self, kind: object, error: object, traceback: TracebackType | None) -> None:
        self.close()

    def cancel(self) -> None:
        """Stops the request, from any thread; the iterating task or thread gets CancelledByCallerError."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """Stops the request if it has not ended. Idempotent; not while another thread iterates: use `cancel` there."""
        self._cancelled.set()
        self._pieces.close()

    def _run(self) -> Generator[T, None, None]:
        calling, question = self._calling, self._question
        attempt = 0
        while True:
            self._check_cancelled()
            has_begun = False
            self._call = call = calling.begin(question.method, question.message, question.deadline_s)
            try:
                # A cancel by another thread may have come before `_call` was set, and then it has not cancelled this call.
                self._check_cancelled()
                for message in call:
                    has_begun = True
                    yield question.read(message)
                return
            except grpc.RpcError as error:
                self._check_cancelled()
                failure = from_rpc_error(error, where=calling.address, has_begun=has_begun)
                wait_s = None if has_begun else calling.wait_s(failure, attempt, question.deadline_s)
                if wait_s is None:
                    raise failure from error
            finally:
                # Also when the caller closes the generator early: the request must not go on.
                call.cancel()
            # A sleep that `cancel` ends.
            self._cancelled.wait(wait_s)
            attempt += 1

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CancelledByCallerError("the stream was cancelled")


class Batches:
    """Batches: many requests that run when the mesh has room. `client.batches`."""

    def __init__(self, stub: Any, one: Callable[..., Any], stream: Callable[..., Stream[BatchAnswer]]) -> None:
        self._stub = stub
        self._one = one
        self._stream = stream

    def create(
        self,
        endpoint: str,
        requests: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        input_file_id: str = "",
        window_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Creates a batch of request bodies of `endpoint`, such as /v1/chat/completions, by custom id; or of a file that was
        uploaded over HTTP. Retried only if the server refused it: after LostError the batch may exist."""
        message = create_batch_message(
            endpoint, requests, input_file_id=input_file_id, window_s=window_s, metadata=metadata
        )
        return from_batch(self._one(self._stub.CreateBatch, message, timeout_s, is_repeatable=False).batch)

    def get(self, batch_id: str, *, timeout_s: float | None = None) -> Batch:
        return from_batch(self._one(self._stub.GetBatch, get_batch_message(batch_id), timeout_s).batch)

    def list(self, *, limit: int = 20, after: str = "", timeout_s: float | None = None) -> list[Batch]:
        """Returns the caller's batches, the newest first. `after`: id of the last one of the previous page."""
        page = self._one(self._stub.ListBatches, list_batches_message(limit, after), timeout_s)
        return [from_batch(each) for each in page.batches]

    def cancel(self, batch_id: str, *, timeout_s: float | None = None) -> Batch:
        """Starts to cancel. Results that exist are kept."""
        return from_batch(self._one(self._stub.CancelBatch, cancel_batch_message(batch_id), timeout_s).batch)

    def wait(self, batch_id: str, *, poll_s: float = 1.0, timeout_s: float | None = None) -> Batch:
        """Waits for the end. Raises DeadlineError after `timeout_s`; None: waits until the batch's window is over."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (batch := self.get(batch_id)).has_ended:
            if until_s is not None and time.monotonic() + poll_s > until_s:
                raise DeadlineError(f"{batch_id} has not ended yet")
            time.sleep(poll_s)
        return batch

    def results(self, batch_id: str, *, timeout_s: float | None = None) -> Stream[BatchAnswer]:
        """Returns the answers of a batch that has ended, one per request."""
        message = batch_results_message(batch_id)
        return self._stream(self._stub.ListBatchResults, message, from_batch_result, timeout_s=timeout_s)


class Client:
    """One channel to a frontend's gRPC address; threads may share it. `generator` draws the jitter of pauses between attempts."""

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
        """Returns a whole answer to a conversation."""
        return self._whole(self._calling.chat(self._stub, model, messages, arguments=arguments, is_stream=False))

    def chat_stream(self, model: str, messages: Messages, **arguments: Unpack[ChatArguments]) -> Stream[Piece]:
        """Returns a stream of the answer, in pieces as they arrive."""
        return Stream(
            self._calling, self._calling.chat(self._stub, model, messages, arguments=arguments, is_stream=True)
        )

    def generate(self, model: str, prompt: str | Sequence[int], **arguments: Unpack[GenerateArguments]) -> Answer:
        """Returns a whole continuation of a text or of token ids."""
        return self._whole(self._calling.generate(self._stub, model, prompt, arguments=arguments, is_stream=False))

    def generate_stream(
        self, model: str, prompt: str | Sequence[int], **arguments: Unpack[GenerateArguments]
    ) -> Stream[Piece]:
        """Returns a stream of the answer, in pieces as they arrive."""
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
        """Returns the models that are served now."""
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
