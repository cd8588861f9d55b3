"""Converts the decoded messages of gRPC clients to requests of the pipeline, without protobuf."""

from dataclasses import fields, replace

from kvmesh.core import SamplingParams
from kvmesh.errors import DeadlineError, InvalidRequestError, UnsupportedError
from kvmesh.rpc.codec.inference import ChatCall, EmbedInputs, GenerateCall, Options
from kvmesh.telemetry import current_traceparent
from services.frontend.pipeline.embed import EmbedRequest
from services.frontend.pipeline.request import Conversation, Prompt, Request, ToolChoice, ToolMode

_FIELDS = {each.name: f"options.sampling.{each.name}" for each in fields(SamplingParams)} | {
    name: f"options.{name}" for name in ("choices", "priority", "cache_salt", "adapter", "request_id")
}


def generate_request(call: GenerateCall, request_id: str, left_s: float | None) -> Request:
    """Converts a prompt. `left_s`: seconds until the call's deadline."""
    request = _request(call.model, call.options, request_id, left_s=left_s, prompt=call.prompt, prompt_field="prompt")
    return replace(request, adds_special_tokens=call.adds_special_tokens)


def chat_request(call: ChatCall, request_id: str, left_s: float | None) -> Request:
    """Converts a conversation."""
    conversation = conversation_of(call)
    return _request(call.model, call.options, request_id, left_s=left_s, prompt=conversation, prompt_field="messages")


def embed_request(call: EmbedInputs, request_id: str, left_s: float | None) -> EmbedRequest:
    """Converts the inputs of an embedding call."""
    asked = Request(
        request_id=request_id,
        model=call.model,
        prompt="",
        priority=call.priority,
        prompt_tokens_kept=call.prompt_tokens_kept,
        timeout_s=timeout_s(own_s=None, left_s=left_s),
        traceparent=current_traceparent(),
    )
    return EmbedRequest(asked=asked, inputs=call.inputs, dimensions=call.dimensions, inputs_name=call.inputs_name)


def conversation_of(call: ChatCall, *, prefix: str = "") -> Conversation:
    """Converts a conversation and checks its choice of tools."""
    return Conversation(
        messages=call.messages,
        tools=call.tools if call.tool_choice != "none" else (),
        tool_choice=_tool_choice(call, prefix),
        documents=call.documents,
        arguments=call.template_arguments,
        adds_generation_prompt=not call.continues_final_message,
        continues_final_message=call.continues_final_message,
    )


def _tool_choice(call: ChatCall, prefix: str) -> ToolChoice:
    mode, _, name = call.tool_choice.partition(":")
    if mode in ("required", "named") and not call.tools:
        raise InvalidRequestError(f"{prefix}tool_choice needs tools", field=f"{prefix}tool_choice")
    if mode == "named" and name not in [tool["function"]["name"] for tool in call.tools]:
        raise InvalidRequestError(f"{prefix}tool_name must be the name of one of the tools", field=f"{prefix}tool_name")
    strict = call.strict if mode != "none" else ()
    return ToolChoice(mode=ToolMode(mode), name=name, is_parallel=call.is_parallel, strict=strict)


def _request(
    model: str, options: Options, request_id: str, *, left_s: float | None, prompt: Prompt, prompt_field: str
) -> Request:
    if options.media:
        raise UnsupportedError("no worker accepts media", field="options.media", reason="media_unsupported")
    return Request(
        request_id=request_id,
        model=model,
        prompt=prompt,
        sampling=options.sampling,
        choices=options.choices,
        adapter=options.adapter,
        cache_salt=options.cache_salt,
        priority=options.priority,
        session_id=options.session_id,
        prompt_tokens_kept=options.prompt_tokens_kept,
        includes_stop=options.includes_stop,
        timeout_s=timeout_s(own_s=options.timeout_s, left_s=left_s),
        traceparent=current_traceparent(),
        fields=_FIELDS | {"prompt": prompt_field},
    )


def timeout_s(own_s: float | None, left_s: float | None) -> float | None:
    """Returns the shorter of the request's own timeout and the time to the call's deadline. Raises DeadlineError if that has passed."""
    limits = [limit for limit in (own_s, left_s) if limit is not None]
    if limits and min(limits) <= 0:
        raise DeadlineError("the caller's deadline has passed")
    return min(limits, default=None)
