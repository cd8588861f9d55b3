"""InferenceService for the frontend: requests as plain values, and responses as messages.

Conversations have the shape of OpenAI's messages, which chat templates take.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.types.v1 import output_pb2
from kvmesh.checks import REQUEST_ID_CHARACTERS_MAX, check_length, check_range
from kvmesh.core import FinishReason, Media, SamplingParams, TokenLogprob, Usage
from kvmesh.errors import InvalidRequestError, MeshError
from kvmesh.rpc.clients import EmbedResult
from kvmesh.rpc.codec.json_texts import JsonTexts
from kvmesh.rpc.codec.sampling import DOCUMENT_BYTES_MAX, from_sampling
from kvmesh.rpc.codec.scalars import known_enum, optional_field, positive_duration, required_text
from kvmesh.rpc.codec.struct import StructReader
from kvmesh.rpc.codec.types import FINISH_REASON_NUMBERS, from_media, to_logprobs, to_usage
from kvmesh.rpc.status import to_detail

MESSAGES_MAX = 4096
TOOLS_MAX = 128
CALLS_MAX = 128
DOCUMENTS_MAX = 1024
KEPT_TOKENS_MAX = 2**31 - 1
SESSION_BYTES_MAX = 256
MODEL_CHARACTERS_MAX = 256
INPUTS_MAX = 2048
"""Inputs of one embedding request, as in OpenAI's API."""
_REQUEST_ID_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-")

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")

ROLES: Mapping[int, str] = {
    pb.CHAT_ROLE_SYSTEM: "system",
    pb.CHAT_ROLE_USER: "user",
    pb.CHAT_ROLE_ASSISTANT: "assistant",
    pb.CHAT_ROLE_TOOL: "tool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of all generating methods."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    choices: int = 1
    is_stream: bool = False
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0
    request_id: str = ""
    session_id: str = ""
    timeout_s: float | None = None
    media: Sequence[Media] = ()
    returns_token_ids: bool = False
    prompt_tokens_kept: int | None = None
    includes_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A prompt as text or token ids."""

    model: str
    prompt: str | Sequence[int]
    options: Options
    echoes: bool = False
    adds_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A conversation. `tool_choice` is auto, none, required, or the name of a tool with `named:` before it.

    `strict`: names of tools whose arguments must keep to their schema.
    """

    model: str
    messages: Sequence[Mapping[str, Any]]
    options: Options
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] = ()
    strict: Sequence[str] = ()
    is_parallel: bool = True
    continues_final_message: bool = False
    includes_reasoning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedInputs:
    """Inputs of Embed. `inputs_name`: the field that has them."""

    model: str
    inputs: Sequence[str | Sequence[int]]
    inputs_name: str
    dimensions: int | None = None
    priority: int = 0
    prompt_tokens_kept: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallPiece:
    """A tool call, or the next part of its arguments."""

    index: int
    call_id: str
    name: str
    arguments: str


def from_generate_request(message: pb.GenerateRequest) -> GenerateCall:
    kind = message.WhichOneof("prompt")
    if kind is None or not (message.text or message.token_ids.ids):
        raise InvalidRequestError("text or token_ids must be given", field="prompt")
    return GenerateCall(
        model=required_text(message.model, field="model", characters_max=MODEL_CHARACTERS_MAX),
        prompt=message.text if kind == "text" else list(message.token_ids.ids),
        options=from_options(message.options),
        echoes=message.echo,
        adds_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
    )


def from_chat_request(message: pb.ChatRequest, *, prefix: str = "") -> ChatCall:
    check_length(len(message.messages), f"{prefix}messages", low=1, high=MESSAGES_MAX)
    check_length(len(message.tools), f"{prefix}tools", high=TOOLS_MAX)
    check_length(len(message.documents), f"{prefix}documents", high=DOCUMENTS_MAX)
    texts, structs = JsonTexts(), StructReader()
    return ChatCall(
        model=required_text(message.model, field=f"{prefix}model", characters_max=MODEL_CHARACTERS_MAX),
        messages=[_from_message(each, texts, f"{prefix}messages[{i}].") for i, each in enumerate(message.messages)],
        tools=[_from_tool(each, texts, structs, prefix=f"{prefix}tools[{i}].") for i, each in enumerate(message.tools)],
        tool_choice=_tool_choice(message, prefix),
        template_arguments=structs.read(message.template_arguments, f"{prefix}template_arguments"),
        options=from_options(message.options, prefix=f"{prefix}options."),
        documents=[structs.read(each, f"{prefix}documents[{i}]") for i, each in enumerate(message.documents)],
        strict=[tool.name for tool in message.tools if tool.strict],
        is_parallel=message.parallel_tool_calls if message.HasField("parallel_tool_calls") else True,
        continues_final_message=message.continue_final_message,
        includes_reasoning=not message.exclude_reasoning,
    )


def from_embed_request(message: pb.EmbedRequest) -> EmbedInputs:
    if bool(message.texts) == bool(message.token_ids):
        raise InvalidRequestError("exactly one of texts and token_ids must be given", field="texts")
    name = "texts" if message.texts else "token_ids"
    check_length(len(message.texts) or len(message.token_ids), name, low=1, high=INPUTS_MAX)
    dimensions = optional_field(message, "dimensions")
    check_range(dimensions, "dimensions", low=1, high=2**31 - 1)
    return EmbedInputs(
        model=required_text(message.model, field="model", characters_max=MODEL_CHARACTERS_MAX),
        inputs=list(message.texts) or [list(each.ids) for each in message.token_ids],
        inputs_name=name,
        dimensions=dimensions,
        priority=message.priority,
        prompt_tokens_kept=_kept(message, ""),
    )


def to_embed_response(result: EmbedResult) -> pb.EmbedResponse:
    return pb.EmbedResponse(
        embeddings=[pb.Embedding(values=vector) for vector in result.vectors], usage=to_usage(result.usage)
    )


def from_options(message: pb.GenerationOptions, *, prefix: str = "options.") -> Options:
    """Returns the checked value. An absent message has all defaults."""
    check_length(len(message.session_id.encode()), f"{prefix}session_id", high=SESSION_BYTES_MAX, unit="bytes")
    check_length(len(message.request_id), f"{prefix}request_id", high=REQUEST_ID_CHARACTERS_MAX, unit="characters")
    if not _REQUEST_ID_CHARACTERS.issuperset(message.request_id):
        raise InvalidRequestError(f"{prefix}request_id must have only A-Z a-z 0-9 . _ : -", field=f"{prefix}request_id")
    return Options(
        sampling=from_sampling(message.sampling, prefix=f"{prefix}sampling."),
        choices=message.choices or 1,
        is_stream=message.stream,
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        priority=message.priority,
        request_id=message.request_id,
        session_id=message.session_id,
        timeout_s=positive_duration(message, "timeout", field=f"{prefix}timeout"),
        media=tuple(from_media(each, f"{prefix}media[{i}].") for i, each in enumerate(message.media)),
        returns_token_ids=message.return_token_ids,
        prompt_tokens_kept=_kept(message, prefix),
        includes_stop=message.include_stop,
    )


def _kept(message: pb.GenerationOptions | pb.EmbedRequest, prefix: str) -> int | None:
    count: int | None = optional_field(message, "prompt_tokens_kept")
    field = f"{prefix}prompt_tokens_kept"
    check_range(count, field, low=-1, high=KEPT_TOKENS_MAX)
    if count == 0:
        raise InvalidRequestError(f"{field} must be -1 or at least 1", field=field)
    return count


def _from_message(message: pb.ChatMessage, texts: JsonTexts, prefix: str) -> dict[str, Any]:
    role = known_enum(message.role, ROLES, f"{prefix}role")
    check_length(len(message.tool_calls), f"{prefix}tool_calls", high=CALLS_MAX)
    if message.tool_calls and role != "assistant":
        raise InvalidRequestError(f"{prefix}tool_calls belong to the assistant", field=f"{prefix}tool_calls")
    if not message.content and role in ("system", "user"):
        raise InvalidRequestError(f"{prefix}content must not be empty", field=f"{prefix}content")
    value: dict[str, Any] = {"role": role, "content": message.content}
    if message.tool_calls:
        value["tool_calls"] = [
            _from_call(each, texts, f"{prefix}tool_calls[{i}].") for i, each in enumerate(message.tool_calls)
        ]
    optional = (
        ("tool_call_id", message.tool_call_id),
        ("name", message.name),
        ("reasoning_content", message.reasoning),
    )
    value.update({name: text for name, text in optional if text})
    return value


def _from_call(call: pb.ToolCall, texts: JsonTexts, prefix: str) -> dict[str, Any]:
    """Converts a tool call. Its arguments become an object, as chat templates need them."""
    arguments = _object(call.arguments or "{}", texts, field=f"{prefix}arguments")
    name = required_text(call.name, field=f"{prefix}name", characters_max=256)
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _object(text: str, texts: JsonTexts, field: str) -> dict[str, Any]:
    value = texts.object_in(text)
    if value is None:
        raise InvalidRequestError(f"{field} must be a JSON object", field=field)
    return value


def _from_tool(tool: pb.Tool, texts: JsonTexts, structs: StructReader, *, prefix: str) -> dict[str, Any]:
    if not _TOOL_NAME.match(tool.name):
        raise InvalidRequestError(
            f"{prefix}name must have 1 to 64 characters of A-Z a-z 0-9 _ . -", field=f"{prefix}name"
        )
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.HasField("parameters") and tool.parameters_json:
        raise InvalidRequestError(f"{prefix}parameters and parameters_json are both given", field=f"{prefix}parameters")
    if tool.parameters_json:
        check_length(len(tool.parameters_json), f"{prefix}parameters_json", high=DOCUMENT_BYTES_MAX, unit="bytes")
        function["parameters"] = _object(tool.parameters_json, texts, field=f"{prefix}parameters_json")
    elif tool.HasField("parameters"):
        function["parameters"] = structs.read(tool.parameters, f"{prefix}parameters")
    return {"type": "function", "function": function}


def _tool_choice(message: pb.ChatRequest, prefix: str) -> str:
    words: Mapping[int, str] = {
        pb.TOOL_CHOICE_UNSPECIFIED: "auto",
        pb.TOOL_CHOICE_AUTO: "auto",
        pb.TOOL_CHOICE_NONE: "none",
        pb.TOOL_CHOICE_REQUIRED: "required",
        pb.TOOL_CHOICE_NAMED: f"named:{message.tool_name}",
    }
    return known_enum(message.tool_choice, words, f"{prefix}tool_choice")


def to_generate_response(
    request_id: str,
    choice: int,
    *,
    text: str = "",
    token_ids: Sequence[int] = (),
    logprobs: Sequence[TokenLogprob] | None = None,
    finish: FinishReason | None = None,
    prompt_logprobs: Sequence[TokenLogprob] | None = None,
) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=request_id,
        choice=choice,
        text=text,
        token_ids=token_ids,
        logprobs=None if logprobs is None else to_logprobs(logprobs),
        finish_reason=_finish(finish),
        prompt_logprobs=None if prompt_logprobs is None else to_logprobs(prompt_logprobs),
    )


def to_chat_response(
    request_id: str,
    choice: int,
    *,
    text: str = "",
    reasoning: str = "",
    tool_calls: Sequence[ToolCallPiece] = (),
    token_ids: Sequence[int] = (),
    logprobs: Sequence[TokenLogprob] | None = None,
    finish: FinishReason | None = None,
    warnings: Sequence[MeshError] = (),
) -> pb.ChatResponse:
    return pb.ChatResponse(
        request_id=request_id,
        choice=choice,
        text=text,
        reasoning=reasoning,
        tool_calls=[
            pb.ToolCall(id=call.call_id, name=call.name, arguments=call.arguments, index=call.index)
            for call in tool_calls
        ],
        token_ids=token_ids,
        logprobs=None if logprobs is None else to_logprobs(logprobs),
        finish_reason=_finish(finish),
        warning=to_detail(warnings[0]) if warnings else None,
        further_warnings=[to_detail(each) for each in warnings[1:]],
    )


def _finish(reason: FinishReason | None) -> output_pb2.FinishReason:
    return output_pb2.FINISH_REASON_UNSPECIFIED if reason is None else FINISH_REASON_NUMBERS[reason]


def to_generate_usage(request_id: str, usage: Usage) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id=request_id, usage=to_usage(usage))


def to_chat_usage(request_id: str, usage: Usage) -> pb.ChatResponse:
    return pb.ChatResponse(request_id=request_id, usage=to_usage(usage))
