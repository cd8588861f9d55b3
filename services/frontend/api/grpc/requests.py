"""Turns the decoded messages of gRPC clients into requests of the pipeline. No protobuf here."""

from dataclasses import fields

from kvmesh.core import SamplingParams
from kvmesh.errors import DeadlineError, InvalidRequestError, UnsupportedError
from kvmesh.rpc.codec.inference import ChatCall, EmbedInputs, GenerateCall, Options
from kvmesh.telemetry import current_traceparent
from services.frontend.pipeline.embed import EmbedRequest
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.request import Conversation, Prompt, Request, ToolChoice, ToolMode

_FIELDS = {each.name: f"options.sampling.{each.name}" for each in fields(SamplingParams)} | {
    name: f"options.{name}" for name in ("choices", "priority", "cache_salt", "adapter", "request_id")
}


def generate_request(pipeline: Pipeline, call: GenerateCall, left_s: float | None) -> Request:
    """A prompt. `left_s`: seconds until the call's deadline."""
    return _request(
        pipeline, call.model, call.prompt, call.options, left_s, "prompt", adds_special_tokens=call.adds_special_tokens
    )


def chat_request(pipeline: Pipeline, call: ChatCall, left_s: float | None) -> tuple[Request, Conversation]:
    """A conversation, also as it is."""
    conversation = conversation_of(call)
    return _request(pipeline, call.model, conversation, call.options, left_s, "messages"), conversation


def embed_request(pipeline: Pipeline, call: EmbedInputs, left_s: float | None) -> EmbedRequest:
    """Inputs for vectors."""
    asked = Request(
        request_id=pipeline.new_id(),
        model=call.model,
        prompt="",
        priority=call.priority,
        prompt_tokens_kept=call.prompt_tokens_kept,
        timeout_s=timeout_s(None, left_s),
        traceparent=current_traceparent(),
    )
    return EmbedRequest(asked=asked, inputs=call.inputs, dimensions=call.dimensions, inputs_name=call.inputs_name)


def conversation_of(call: ChatCall, *, prefix: str = "") -> Conversation:
    """The conversation, its choice of tools checked."""
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
    pipeline: Pipeline,
    model: str,
    prompt: Prompt,
    options: Options,
    left_s: float | None,
    prompt_field: str,
    *,
    adds_special_tokens: bool = True,
) -> Request:
    if options.media:
        raise UnsupportedError("no worker takes media", field="options.media", reason="media_unsupported")
    return Request(
        request_id=options.request_id or pipeline.new_id(),
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
        adds_special_tokens=adds_special_tokens,
        timeout_s=timeout_s(options.timeout_s, left_s),
        traceparent=current_traceparent(),
        fields=_FIELDS | {"prompt": prompt_field},
    )


def timeout_s(own_s: float | None, left_s: float | None) -> float | None:
    """The shorter of the request's own time and what the call's deadline leaves. DeadlineError when that has passed."""
    limits = [limit for limit in (own_s, left_s) if limit is not None]
    if limits and min(limits) <= 0:
        raise DeadlineError("the caller's deadline has passed")
    return min(limits, default=None)
