"""InferenceService for clients: requests as messages, and responses as plain values.

Conversations and tools have the shape of OpenAI's messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvmesh.core import FinishReason, TokenLogprob, Usage
from kvmesh.errors import InvalidRequestError, MeshError
from kvmesh.rpc.codec.inference import ROLES, Options, ToolCallPiece
from kvmesh.rpc.codec.message_codec import MessageCodec
from kvmesh.rpc.codec.sampling import to_sampling
from kvmesh.rpc.codec.scalars import to_positive_duration
from kvmesh.rpc.codec.struct import to_struct
from kvmesh.rpc.codec.types import FINISH_REASONS, from_logprobs, from_usage, to_media
from kvmesh.rpc.status import from_detail

_ROLE_NUMBERS: Mapping[str, Any] = {role: number for number, role in ROLES.items()}
_CHOICE_NUMBERS: Mapping[str, Any] = {
    "auto": pb.TOOL_CHOICE_AUTO,
    "none": pb.TOOL_CHOICE_NONE,
    "required": pb.TOOL_CHOICE_REQUIRED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a response. Only the last one, which belongs to no choice, has `usage`."""

    request_id: str
    choice: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallPiece] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    warnings: Sequence[MeshError] = ()
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Embeddings in the order of the inputs."""

    vectors: Sequence[Sequence[float]]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A served model."""

    name: str
    context_tokens_max: int
    features: Sequence[str]
    workers_ready: int
    adapters: Sequence[str]


_MODEL = MessageCodec(pb.Model, ModelInfo)


def inference_stub(channel: Any) -> Any:
    return InferenceServiceStub(channel)


def generate_message(
    model: str,
    prompt: str | Sequence[int],
    options: Options,
    *,
    echoes: bool = False,
    adds_special_tokens: bool = True,
) -> pb.GenerateRequest:
    """`prompt`: text or token ids."""
    text = prompt if isinstance(prompt, str) else None
    token_ids = None if isinstance(prompt, str) else pb.TokenIds(ids=prompt)
    return pb.GenerateRequest(
        model=model,
        text=text,
        token_ids=token_ids,
        options=to_options(options),
        echo=echoes,
        add_special_tokens=adds_special_tokens,
    )


def chat_message(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    options: Options,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str = "auto",
    is_parallel: bool = True,
    template_arguments: Mapping[str, Any] | None = None,
    continues_final_message: bool = False,
    includes_reasoning: bool = True,
) -> pb.ChatRequest:
    """Returns a conversation. `tool_choice`: auto, none, required, or a tool's name."""
    named = tool_choice not in _CHOICE_NUMBERS
    message = pb.ChatRequest(
        model=model,
        messages=[_message(each, f"messages[{i}]") for i, each in enumerate(messages)],
        tools=[_tool(each, f"tools[{i}]") for i, each in enumerate(tools)],
        tool_choice=pb.TOOL_CHOICE_NAMED if named else _CHOICE_NUMBERS[tool_choice],
        tool_name=tool_choice if named else "",
        options=to_options(options),
        parallel_tool_calls=is_parallel,
        continue_final_message=continues_final_message,
        exclude_reasoning=not includes_reasoning,
    )
    if template_arguments:
        message.template_arguments.CopyFrom(to_struct(template_arguments, "template_arguments"))
    return message


def embed_message(
    model: str, inputs: Sequence[str] | Sequence[Sequence[int]], *, dimensions: int | None = None
) -> pb.EmbedRequest:
    """Texts, or lists of token ids; not both."""
    message = pb.EmbedRequest(model=model, dimensions=dimensions)
    for each in inputs:
        if isinstance(each, str):
            message.texts.append(each)
        else:
            message.token_ids.add(ids=each)
    return message


def tokenize_message(
    model: str,
    text: str | Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    adds_special_tokens: bool = False,
) -> pb.TokenizeRequest:
    if isinstance(text, str):
        return pb.TokenizeRequest(model=model, text=text, add_special_tokens=adds_special_tokens)
    return pb.TokenizeRequest(model=model, chat=chat_message(model, text, Options(), tools=tools))


def detokenize_message(
    model: str, token_ids: Sequence[int], *, skips_special_tokens: bool = False
) -> pb.DetokenizeRequest:
    return pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skips_special_tokens)


def models_message() -> pb.ListModelsRequest:
    return pb.ListModelsRequest()


def to_options(options: Options) -> pb.GenerationOptions:
    message = pb.GenerationOptions(
        sampling=to_sampling(options.sampling),
        choices=options.choices,
        stream=options.is_stream,
        adapter=options.adapter,
        cache_salt=options.cache_salt,
        priority=options.priority,
        request_id=options.request_id,
        session_id=options.session_id,
        media=[to_media(each) for each in options.media],
        return_token_ids=options.returns_token_ids,
        prompt_tokens_kept=options.prompt_tokens_kept,
        include_stop=options.includes_stop,
    )
    if options.timeout_s is not None:
        message.timeout.CopyFrom(to_positive_duration(options.timeout_s))
    return message


def _message(value: Mapping[str, Any], field: str) -> pb.ChatMessage:
    role = _ROLE_NUMBERS.get(str(value.get("role")))
    if role is None:
        raise InvalidRequestError(f"{field}.role must be one of {', '.join(_ROLE_NUMBERS)}", field=f"{field}.role")
    content = value.get("content") or ""
    if not isinstance(content, str):
        raise InvalidRequestError(f"{field}.content must be a string", field=f"{field}.content")
    return pb.ChatMessage(
        role=role,
        content=content,
        tool_calls=[_call(each) for each in value.get("tool_calls") or ()],
        tool_call_id=value.get("tool_call_id") or "",
        name=value.get("name") or "",
        reasoning=value.get("reasoning_content") or "",
    )


def _call(value: Mapping[str, Any]) -> pb.ToolCall:
    function = value["function"]
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json_text(arguments, "arguments")
    return pb.ToolCall(id=value.get("id") or "", name=function["name"], arguments=text)


def json_text(value: Any, field: str) -> str:
    """Returns the value as a JSON document. Raises InvalidRequestError if it has another type than those of JSON."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        raise InvalidRequestError(f"{field} must hold JSON values only", field=field) from None


def _tool(value: Mapping[str, Any], field: str) -> pb.Tool:
    function = value.get("function") or {}
    parameters = function.get("parameters")
    return pb.Tool(
        name=function.get("name") or "",
        description=function.get("description") or "",
        strict=bool(function.get("strict")),
        parameters_json="" if parameters is None else json_text(parameters, f"{field}.function.parameters"),
    )


def from_generate_response(message: pb.GenerateResponse) -> Piece:
    prompt_logprobs = from_logprobs(message.prompt_logprobs) if message.HasField("prompt_logprobs") else None
    return Piece(**_shared_fields(message), prompt_logprobs=prompt_logprobs)


def from_chat_response(message: pb.ChatResponse) -> Piece:
    first = [message.warning] if message.HasField("warning") else []
    return Piece(
        **_shared_fields(message),
        reasoning=message.reasoning,
        tool_calls=[
            ToolCallPiece(index=call.index, call_id=call.id, name=call.name, arguments=call.arguments)
            for call in message.tool_calls
        ],
        warnings=[from_detail(each) for each in (*first, *message.further_warnings)],
    )


def _shared_fields(message: pb.GenerateResponse | pb.ChatResponse) -> dict[str, Any]:
    return {
        "request_id": message.request_id,
        "choice": message.choice,
        "text": message.text,
        "token_ids": list(message.token_ids),
        "logprobs": from_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        "finish_reason": FINISH_REASONS.get(message.finish_reason),
        "usage": from_usage(message.usage) if message.HasField("usage") else None,
    }


def from_embed_response(message: pb.EmbedResponse) -> Embedded:
    return Embedded(vectors=[list(each.values) for each in message.embeddings], usage=from_usage(message.usage))


def from_models_response(message: pb.ListModelsResponse) -> list[ModelInfo]:
    return list(map(_MODEL.decode, message.models))
