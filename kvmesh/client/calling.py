"""Shared by both clients: deadlines, the API key, and retries."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Generic, TypedDict, TypeVar

import grpc

from kvmesh.client.settings import ClientSettings
from kvmesh.core import SamplingParams
from kvmesh.errors import LostError, MeshError
from kvmesh.rpc.codec.client_inference import (
    Piece,
    chat_message,
    from_chat_response,
    from_generate_response,
    generate_message,
)
from kvmesh.rpc.codec.inference import Options
from kvmesh.rpc.status import from_rpc_error

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]
"""A conversation in the shape of OpenAI's messages."""


class CommonArguments(TypedDict, total=False):
    """`sampling` replaces that of `options`. `timeout_s` None: the client's own."""

    sampling: SamplingParams | None
    options: Options | None
    timeout_s: float | None


class ChatArguments(CommonArguments, total=False):
    """`tool_choice`: auto, none, required, or a tool's name."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    is_parallel: bool
    template_arguments: Mapping[str, Any] | None
    continues_final_message: bool
    includes_reasoning: bool


class GenerateArguments(CommonArguments, total=False):
    """`echoes`: the output starts with the prompt."""

    echoes: bool
    adds_special_tokens: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingCall(Generic[T]):
    """A streaming call: method, request, decoder of responses, and deadline."""

    method: Any
    message: Any
    read: Callable[[Any], T]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """The calls of one client. Deadlines are times of the monotonic clock."""

    address: str
    settings: ClientSettings
    generator: Random

    def chat(
        self, stub: Any, model: str, messages: Messages, *, arguments: ChatArguments, is_stream: bool
    ) -> StreamingCall[Piece]:
        options, timeout_s, others = _split(arguments, is_stream)
        message = chat_message(model, messages, options, **others)
        return self.question(stub.Chat, message, from_chat_response, timeout_s=timeout_s)

    def generate(
        self, stub: Any, model: str, prompt: str | Sequence[int], *, arguments: GenerateArguments, is_stream: bool
    ) -> StreamingCall[Piece]:
        options, timeout_s, others = _split(arguments, is_stream)
        message = generate_message(model, prompt, options, **others)
        return self.question(stub.Generate, message, from_generate_response, timeout_s=timeout_s)

    def question(
        self, method: Any, message: Any, read: Callable[[Any], T], *, timeout_s: float | None
    ) -> StreamingCall[T]:
        return StreamingCall(method=method, message=message, read=read, deadline_s=self.deadline_s(timeout_s))

    def deadline_s(self, timeout_s: float | None) -> float:
        """Returns the deadline of a call that starts now, including all its attempts."""
        return time.monotonic() + (self.settings.timeout_s if timeout_s is None else timeout_s)

    def begin(self, method: Any, message: Any, deadline_s: float) -> Any:
        left_s = max(1e-3, deadline_s - time.monotonic())
        return method(message, timeout=left_s, metadata=self.settings.metadata())

    def wait_s(self, failure: MeshError, attempt: int, deadline_s: float) -> float | None:
        """See RetryPolicy."""
        return self.settings.retry.wait_s(failure, attempt, deadline_s - time.monotonic(), generator=self.generator)

    def next_wait_s(self, error: grpc.RpcError, attempt: int, deadline_s: float, *, is_repeatable: bool) -> float:
        """Returns the seconds until the next try of a unary call. Raises the call's error if there is none.

        A call that is not repeatable is tried again only if the server refused it.
        """
        # `has_begun` makes a broken connection a LostError: the server may have done the work.
        failure = from_rpc_error(error, where=self.address, has_begun=not is_repeatable)
        is_open = isinstance(failure, LostError) and not is_repeatable
        wait_s = None if is_open else self.wait_s(failure, attempt, deadline_s)
        if wait_s is None:
            raise failure from error
        return wait_s


def _split(arguments: CommonArguments, is_stream: bool) -> tuple[Options, float | None, dict[str, Any]]:
    """Returns the options, the timeout, and the arguments of the message."""
    others: dict[str, Any] = {**arguments}
    options, sampling = others.pop("options", None) or Options(), others.pop("sampling", None)
    timeout_s = others.pop("timeout_s", None)
    return replace(options, sampling=sampling or options.sampling, is_stream=is_stream), timeout_s, others
