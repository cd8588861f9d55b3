"""Whole answers and errors as JSON bodies."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kvmesh.core import FinishReason, TokenLogprob, Usage
from kvmesh.errors import WORKER_LOST_TWICE, MeshError, UnauthenticatedError
from kvmesh.rpc.http_status import http_status
from services.frontend.api.answer_reader import ReadCall, Reading, ReadMessage
from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.logprobs import (
    AnswerOffsets,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from services.frontend.models import ServedModel
from services.frontend.pipeline.request import Ending

CHAT_OBJECT, CHAT_CHUNK_OBJECT, COMPLETION_OBJECT = "chat.completion", "chat.completion.chunk", "text_completion"


class Collected:
    """An outlet that keeps the whole answer. Choice numbers run over all prompts. `messages`: what `reading` made of it."""

    is_whole = True

    def __init__(self, choices: int, reading: Reading | None = None) -> None:
        self.reading = reading
        self.messages = [ReadMessage() for _ in range(choices)]
        self.texts: list[list[str]] = [[] for _ in range(choices)]
        self.token_ids: list[list[int]] = [[] for _ in range(choices)]
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]
        self.prompts: list[Sequence[TokenLogprob]] = [()] * choices
        self.endings: list[Ending | None] = [None] * choices

    def on_restart(self, choice: int) -> None:
        """See AnswerSink."""
        if self.reading is not None:
            self.reading.restart(choice)
        self.messages[choice] = ReadMessage()
        self.texts[choice], self.token_ids[choice], self.logprobs[choice] = [], [], []
        self.prompts[choice], self.endings[choice] = (), None

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """See AnswerSink."""
        if self.reading is None:
            self.texts[choice].append(text)
        else:
            parts = self.reading.push(choice, text, len(token_ids))
            self.reading.gather(choice, self.messages[choice], parts)
        self.token_ids[choice].extend(token_ids)
        if logprobs:
            self.logprobs[choice].extend(logprobs)

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See AnswerSink."""
        self.prompts[choice] = entries

    def on_end(self, choice: int, ending: Ending) -> None:
        """See AnswerSink."""
        self.endings[choice] = ending
        if self.reading is not None:
            self.reading.gather(choice, self.messages[choice], self.reading.flush(choice))

    def message(self, choice: int) -> ReadMessage:
        """A choice that is over."""
        return self.messages[choice] if self.reading is not None else ReadMessage(contents=self.texts[choice])

    def drop_answer(self) -> None:
        """Forgets what was generated: only the prompt was asked for."""
        count = len(self.texts)
        self.texts, self.token_ids, self.logprobs = [[]] * count, [[]] * count, [[]] * count
        self.endings = [Ending(reason=FinishReason.LENGTH)] * count


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def call_body(call: ReadCall) -> dict[str, Any]:
    """A whole tool call."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def finish_word(ending: Ending, calls: int) -> str:
    """`finish_reason`: an answer that ended by itself with calls ended for them."""
    if calls and ending.reason is FinishReason.STOP:
        return FinishReason.TOOL_CALLS.value
    return ending.reason.value


def stop_reason(ending: Ending) -> str | int | None:
    """vLLM's extension: which stop string or token it was."""
    return ending.stop


def chat_body(
    asked: Asked, model: ServedModel, collected: Collected, usage: Usage, *, created_s: int, prompt_ids: Sequence[int]
) -> dict[str, Any]:
    """`chat.completion`."""
    request_id = asked.requests[0].request_id
    body: dict[str, Any] = {
        "id": f"chatcmpl-{request_id}",
        "object": CHAT_OBJECT,
        "created": created_s,
        "model": asked.model,
        "choices": [_chat_choice(asked, model, collected, i) for i in range(asked.choices)],
        "usage": usage_body(usage),
    }
    if asked.returns_token_ids:
        body["prompt_token_ids"] = list(prompt_ids)
    body["prompt_logprobs"] = (
        prompt_logprobs(model.text, prompt_ids, collected.prompts[0]) if asked.has_prompt_logprobs else None
    )
    return body


def _chat_choice(asked: Asked, model: ServedModel, collected: Collected, i: int) -> dict[str, Any]:
    read = collected.message(i)
    message: dict[str, Any] = {"role": "assistant", "content": read.content, "refusal": None}
    if read.reasoning is not None:
        message["reasoning_content"] = message["reasoning"] = read.reasoning
    if read.calls:
        message["tool_calls"] = [call_body(call) for call in read.calls]
    ending = _ending(collected, i)
    choice: dict[str, Any] = {
        "index": i,
        "message": message,
        "logprobs": None,
        "finish_reason": finish_word(ending, len(read.calls)),
        "stop_reason": stop_reason(ending),
    }
    if asked.has_logprobs:
        found = chat_logprobs(
            model.text, collected.token_ids[i], collected.logprobs[i], as_ids=asked.names_tokens_by_id
        )
        choice["logprobs"] = orjson.Fragment(found)
    if asked.returns_token_ids:
        choice["token_ids"] = collected.token_ids[i]
    return choice


def completion_body(
    asked: Asked,
    model: ServedModel,
    collected: Collected,
    usage: Usage,
    *,
    created_s: int,
    echoes: Sequence[str],
    prompt_ids: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """`text_completion`. `echoes`: per prompt what comes before its answers."""
    base_id = asked.requests[0].request_id.partition(".")[0]
    per_prompt = asked.requests[0].choices
    choices = [
        _completion_choice(asked, model, collected, i, echoes[i // per_prompt], prompt_ids[i // per_prompt])
        for i in range(asked.choices)
    ]
    return {
        "id": f"cmpl-{base_id}",
        "object": COMPLETION_OBJECT,
        "created": created_s,
        "model": asked.model,
        "choices": choices,
        "usage": usage_body(usage),
    }


def _completion_choice(
    asked: Asked, model: ServedModel, collected: Collected, i: int, echo: str, prompt_ids: Sequence[int]
) -> dict[str, Any]:
    ending, text = _ending(collected, i), model.text
    choice: dict[str, Any] = {
        "index": i,
        "text": echo + "".join(collected.texts[i]),
        "logprobs": _completion_logprobs(asked, model, collected, i, echo, prompt_ids) if asked.has_logprobs else None,
        "finish_reason": finish_word(ending, 0),
        "stop_reason": stop_reason(ending),
        "prompt_logprobs": None,
    }
    if asked.has_prompt_logprobs:
        choice["prompt_logprobs"] = prompt_logprobs(text, prompt_ids, collected.prompts[i])
    if asked.returns_token_ids:
        choice["prompt_token_ids"], choice["token_ids"] = list(prompt_ids), collected.token_ids[i]
    return choice


def _completion_logprobs(
    asked: Asked, model: ServedModel, collected: Collected, i: int, echo: str, prompt_ids: Sequence[int]
) -> dict[str, Any]:
    """Of the answer, after those of the prompt where it is echoed."""
    text, token_ids, as_ids = model.text, collected.token_ids[i], asked.names_tokens_by_id
    offsets = offsets_of(asked, model, echo).take(token_ids)
    answer = completion_logprobs(text, token_ids, collected.logprobs[i], offsets, as_ids=as_ids)
    if not asked.echoes:
        return answer
    prompt = echoed_logprobs(text, prompt_ids, collected.prompts[i], echo, as_ids=as_ids)
    return {name: values + answer[name] for name, values in prompt.items()}


def offsets_of(asked: Asked, model: ServedModel, echo: str) -> AnswerOffsets:
    """Where the tokens of an answer begin in its text."""
    skips = asked.requests[0].sampling.skip_special_tokens
    return AnswerOffsets(model.text.detokeniser(skip_special_tokens=skips), len(echo))


def _ending(collected: Collected, i: int) -> Ending:
    ending = collected.endings[i]
    assert ending is not None, "a request that ended well has ended every choice"
    return ending


def sum_usage(usages: Sequence[Usage]) -> Usage:
    """Totals over prompts."""
    if len(usages) == 1:
        return usages[0]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        output_tokens=sum(usage.output_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        transferred_tokens=sum(usage.transferred_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )


def error_body(error: MeshError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": error.message,
            "type": http_status(error)[1],
            "param": error.field or None,
            "code": error.reason,
        }
    }


def error_headers(error: MeshError) -> Mapping[str, str]:
    """Retry-After in whole seconds, where the error says when to come back; how to ask, where a key is missing.

    `x-should-retry: false` for a request that may have killed its workers.
    """
    if isinstance(error, UnauthenticatedError):
        return {"WWW-Authenticate": "Bearer"}
    if error.reason == WORKER_LOST_TWICE:
        # The clients of OpenAI and Anthropic try again after any 5xx that does not say so.
        return {"x-should-retry": "false"}
    if error.retry_after_s is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}


def model_body(model: ServedModel, name: str) -> dict[str, Any]:
    """One entry of /v1/models; adapters name their base model as parent. `root` as vLLM has it."""
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "kvmesh",
        "max_model_len": model.context_tokens_max,
        "root": (model.source or name) if name == model.name else name,
        "parent": model.name if name != model.name else None,
        "parsers": parsers_body(model),
    }


def parsers_body(model: ServedModel) -> dict[str, Any]:
    """How the model's answers are read, and what about that does not fit."""
    selection = model.text.selection
    return {
        "tool_parser": selection.tools.name if selection.tools is not None else None,
        "reasoning_parser": selection.reasoning.name if selection.reasoning is not None else None,
        "problems": list(selection.problems),
    }


def to_json(body: Any) -> bytes:
    """Compact JSON."""
    return orjson.dumps(body)
