"""JSON bodies of OpenAI's API: whole answers, models and errors."""

from collections.abc import Sequence
from typing import Any

import orjson

from kvmesh.core import FinishReason, Usage
from kvmesh.errors import MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.api.answer_blocks import AnswerCollector, BlockKind, CollectedChoice
from services.frontend.api.openai.logprobs import (
    AnswerOffsets,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from services.frontend.api.run import ApiRequest
from services.frontend.models import ServedModel
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import Ending

CHAT_OBJECT, CHAT_CHUNK_OBJECT, COMPLETION_OBJECT = "chat.completion", "chat.completion.chunk", "text_completion"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def ending_fields(ending: Ending, calls: int = 0) -> dict[str, Any]:
    """Returns `finish_reason`, and `stop_reason` (vLLM's): the stop string or token. An answer with calls stopped for them."""
    reason = FinishReason.TOOL_CALLS if calls and ending.reason is FinishReason.STOP else ending.reason
    return {"finish_reason": reason.value, "stop_reason": ending.stop}


def chat_body(
    request: ApiRequest, prepared: Prepared, collected: AnswerCollector, *, usage: Usage, created_s: int
) -> dict[str, Any]:
    """Returns a `chat.completion`."""
    text, prompt_ids = prepared.model.text, prepared.generation.token_ids
    body: dict[str, Any] = {
        "id": f"chatcmpl-{request.requests[0].request_id}",
        "object": CHAT_OBJECT,
        "created": created_s,
        "model": request.model,
        "choices": [_chat_choice(request, prepared.model, each, i=i) for i, each in enumerate(collected.choices)],
        "usage": usage_body(usage),
    }
    if request.returns_token_ids:
        body["prompt_token_ids"] = list(prompt_ids)
    body["prompt_logprobs"] = (
        prompt_logprobs(text, prompt_ids, collected.choices[0].prompt_logprobs) if request.has_prompt_logprobs else None
    )
    return body


def _chat_choice(request: ApiRequest, model: ServedModel, collected: CollectedChoice, *, i: int) -> dict[str, Any]:
    blocks = collected.blocks
    content, reasoning = blocks.text_of(BlockKind.TEXT), blocks.text_of(BlockKind.REASONING)
    is_empty = not content and (blocks.calls or reasoning)
    message: dict[str, Any] = {"role": "assistant", "content": None if is_empty else content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    if blocks.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in blocks.calls
        ]
    choice: dict[str, Any] = {"index": i, "message": message, "logprobs": None}
    choice |= ending_fields(collected.ending, len(blocks.calls))
    if request.has_logprobs:
        choice["logprobs"] = orjson.Fragment(
            chat_logprobs(model.text, collected.token_ids, collected.logprobs, as_ids=request.names_tokens_by_id)
        )
    if request.returns_token_ids:
        choice["token_ids"] = collected.token_ids
    return choice


def completion_body(
    request: ApiRequest, prepared: Sequence[Prepared], collected: AnswerCollector, *, usage: Usage, created_s: int
) -> dict[str, Any]:
    """Returns a `text_completion`."""
    per_prompt = request.requests[0].choices
    echoes = echoed_prompts(request, prepared)
    choices = [
        _completion_choice(request, prepared[i // per_prompt], each, i=i, echo=echoes[i // per_prompt])
        for i, each in enumerate(collected.choices)
    ]
    return {
        "id": f"cmpl-{request.requests[0].request_id.partition('.')[0]}",
        "object": COMPLETION_OBJECT,
        "created": created_s,
        "model": request.model,
        "choices": choices,
        "usage": usage_body(usage),
    }


def _completion_choice(
    request: ApiRequest, prepared: Prepared, collected: CollectedChoice, *, i: int, echo: str
) -> dict[str, Any]:
    text, prompt_ids = prepared.model.text, prepared.generation.token_ids
    # Of a request that wants only the echo, the answer is dropped.
    token_ids = [] if request.is_prompt_only else collected.token_ids
    logprobs: dict[str, Any] | None = None
    if request.has_logprobs:
        as_ids = request.names_tokens_by_id
        offsets = answer_offsets(request, prepared.model, echo).take(token_ids)
        entries = collected.logprobs[: len(token_ids)]
        logprobs = completion_logprobs(text, token_ids, entries, offsets=offsets, as_ids=as_ids)
        if request.echoes:
            prompt = echoed_logprobs(text, prompt_ids, collected.prompt_logprobs, echo=echo, as_ids=as_ids)
            logprobs = {name: values + logprobs[name] for name, values in prompt.items()}
    answer = "" if request.is_prompt_only else collected.blocks.text_of(BlockKind.TEXT)
    ending = Ending(reason=FinishReason.LENGTH) if request.is_prompt_only else collected.ending
    choice: dict[str, Any] = {"index": i, "text": echo + answer, "logprobs": logprobs, **ending_fields(ending)}
    choice["prompt_logprobs"] = (
        prompt_logprobs(text, prompt_ids, collected.prompt_logprobs) if request.has_prompt_logprobs else None
    )
    if request.returns_token_ids:
        choice["prompt_token_ids"], choice["token_ids"] = list(prompt_ids), token_ids
    return choice


def echoed_prompts(request: ApiRequest, prepared: Sequence[Prepared]) -> list[str]:
    """Returns for each prompt the text that precedes its answers."""
    return [echoed_prompt(each) if request.echoes else "" for each in prepared]


def echoed_prompt(prepared: Prepared) -> str:
    """Returns the text of a prompt."""
    request = prepared.request
    if isinstance(request.prompt, str):
        return request.prompt
    skips = request.sampling.skip_special_tokens
    return prepared.model.text.decode(prepared.generation.token_ids, skip_special_tokens=skips)


def answer_offsets(request: ApiRequest, model: ServedModel, echo: str) -> AnswerOffsets:
    skips = request.requests[0].sampling.skip_special_tokens
    return AnswerOffsets(model.text.detokeniser(skip_special_tokens=skips), len(echo))


def error_body(error: MeshError) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    return {
        "error": {
            "message": error.message,
            "type": http_status(error)[1],
            "param": error.field or None,
            "code": error.reason,
        }
    }


def model_body(model: ServedModel, name: str) -> dict[str, Any]:
    """Returns an entry of /v1/models. The parent of an adapter is its base model; `root` is as in vLLM."""
    selection = model.text.selection
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "kvmesh",
        "max_model_len": model.context_tokens_max,
        "root": (model.source or name) if name == model.name else name,
        "parent": model.name if name != model.name else None,
        "parsers": {
            "tool_parser": selection.tools.name if selection.tools is not None else None,
            "reasoning_parser": selection.reasoning.name if selection.reasoning is not None else None,
            "problems": list(selection.problems),
        },
    }
