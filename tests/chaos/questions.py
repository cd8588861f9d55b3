"""Requests of every kind, and their answers before the first fault."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
import orjson

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
FIRST_PROMPT_ID = 10
PROMPT_SPAN = 400
CITY: Mapping[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}

Normal = Mapping[str, Any]
"""An answer without ids, times and cache-dependent fields. Equal for a stream and a body."""


class FailedError(Exception):
    """The mesh answered with an error. The message is its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request. `body` lacks `stream`."""

    path: str
    body: Mapping[str, Any]


def _ids(random: Random, count: int) -> list[int]:
    return [FIRST_PROMPT_ID + random.randrange(PROMPT_SPAN) for _ in range(count)]


def _plain(random: Random, tokens: int) -> Question:
    body = {"prompt": _ids(random, 200), "temperature": 0, "return_token_ids": True}
    return Question(path=COMPLETIONS, body={**body, "max_tokens": tokens, "ignore_eos": True})


def _seeded(random: Random, tokens: int) -> Question:
    body = {
        "prompt": _ids(random, 80),
        "temperature": 1.0,
        "seed": random.getrandbits(31),
        "n": 2,
        "return_token_ids": True,
    }
    return Question(path=COMPLETIONS, body={**body, "max_tokens": tokens, "ignore_eos": True})


def _scored(random: Random, tokens: int) -> Question:
    body = {"prompt": _ids(random, 80), "temperature": 0, "logprobs": 2, "return_token_ids": True, "ignore_eos": True}
    return Question(path=COMPLETIONS, body={**body, "max_tokens": tokens // 2})


def _penalised(random: Random, tokens: int) -> Question:
    body = {"prompt": _ids(random, 80), "temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.9}
    more = {"repetition_penalty": 1.1, "min_tokens": tokens // 2, "return_token_ids": True}
    return Question(path=COMPLETIONS, body={**body, **more, "max_tokens": tokens})


def _stopped(random: Random, tokens: int) -> Question:
    body = {"prompt": _ids(random, 80), "temperature": 0, "stop": ["e", " the", "qu"], "min_tokens": tokens // 2}
    return Question(path=COMPLETIONS, body={**body, "max_tokens": tokens, "return_token_ids": True})


def _asked(random: Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is the weather in the city number {random.randrange(10_000)}?"}]


def _forced_tool(random: Random, tokens: int) -> Question:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {"messages": _asked(random), "temperature": 0, "tools": [TOOL], "tool_choice": choice}
    return Question(path=CHAT, body={**body, "max_tokens": tokens})


def _schema(random: Random, tokens: int) -> Question:
    response_format = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    body = {"messages": _asked(random), "temperature": 0, "response_format": response_format}
    return Question(path=CHAT, body={**body, "max_tokens": tokens})


def _chat(random: Random, tokens: int) -> Question:
    body = {"messages": _asked(random), "temperature": 0, "n": 2, "logit_bias": {"300": 1.5}, "ignore_eos": True}
    return Question(path=CHAT, body={**body, "max_tokens": tokens // 2})


def _message(random: Random, tokens: int) -> Question:
    return Question(path=MESSAGES, body={"messages": _asked(random), "temperature": 0, "max_tokens": tokens})


def _response(random: Random, tokens: int) -> Question:
    body = {"input": _asked(random), "temperature": 0, "max_output_tokens": tokens, "store": False}
    return Question(path=RESPONSES, body=body)


KINDS: Sequence[Callable[[Random, int], Question]] = (
    _plain, _seeded, _scored, _penalised, _stopped, _forced_tool, _schema, _chat, _message, _response,
)  # fmt: skip


def make_questions(random: Random, count: int, tokens: int) -> list[Question]:
    """Returns `count` requests for about `tokens` tokens, alternating between all kinds."""
    return [KINDS[i % len(KINDS)](random, tokens) for i in range(count)]


async def ask(
    session: aiohttp.ClientSession, url: str, question: Question, *, is_stream: bool, pauses_s: list[float]
) -> Normal:
    """Sends a request and returns its answer.

    Raises FailedError for an error, aiohttp's errors for a broken connection, and TimeoutError for a request that hangs. Adds the longest time
    between two events of a stream to `pauses_s`.
    """
    body = {"model": "demo", **question.body, "stream": is_stream}
    if is_stream and question.path not in (MESSAGES, RESPONSES):
        body["stream_options"] = {"include_usage": True}
    async with session.post(url + question.path, json=body) as response:
        if response.status != 200:
            raise FailedError(_code(await response.json()))
        if not is_stream:
            return _normal(question.path, await response.json())
        events, now = [], asyncio.get_running_loop().time
        longest_s, last_s = 0.0, None
        async for line in response.content:
            if line.startswith(b"data: {"):
                events.append(orjson.loads(line[6:]))
                longest_s, last_s = max(longest_s, now() - (last_s or now())), now()
        pauses_s.append(longest_s)
    for event in events:
        if "error" in event:
            raise FailedError(_code(event))
    return _joined(question.path, events)


async def reference(
    session: aiohttp.ClientSession, url: str, questions: Sequence[Question], pauses_s: list[float]
) -> list[Normal]:
    """Returns the answers without faults, requesting two at a time. Checks that streams and bodies are equal."""
    room = asyncio.Semaphore(2)

    async def one(question: Question) -> Normal:
        async with room:
            whole = await ask(session, url, question, is_stream=False, pauses_s=pauses_s)
            streamed = await ask(session, url, question, is_stream=True, pauses_s=pauses_s)
            assert streamed == whole, f"{question}: {streamed} instead of {whole}"
            return whole

    return list(await asyncio.gather(*map(one, questions)))


def _code(body: Mapping[str, Any]) -> str:
    error = body.get("error", {})
    return str(error.get("code") or error.get("type") or error)


def _normal(path: str, body: Mapping[str, Any]) -> Normal:
    if path == MESSAGES:
        text = "".join(block.get("text", "") for block in body["content"])
        return {"text": text, "stop": body["stop_reason"], "usage": body["usage"]["output_tokens"]}
    if path == RESPONSES:
        if body["error"] is not None:
            raise FailedError(_code(body))
        parts = [part["text"] for item in body["output"] for part in item["content"]]
        return {"text": "".join(parts), "stop": body["status"], "usage": body["usage"]["output_tokens"]}
    choices = [_Part().add(choice) for choice in sorted(body["choices"], key=lambda choice: int(choice["index"]))]
    return {"choices": [choice.values() for choice in choices], "usage": _usage(body["usage"])}


def _joined(path: str, events: Sequence[Mapping[str, Any]]) -> Normal:
    """Joins the events of a stream into one body."""
    if path == MESSAGES:
        deltas = [event["delta"] for event in events if "delta" in event]
        text = "".join(delta.get("text", "") for delta in deltas)
        stop = next((delta["stop_reason"] for delta in deltas if delta.get("stop_reason")), "no end")
        return {
            "text": text,
            "stop": stop,
            "usage": next((e["usage"]["output_tokens"] for e in events if "delta" in e and "usage" in e), -1),
        }
    if path == RESPONSES:
        whole = _normal(path, events[-1].get("response") or {"error": {"code": "no end"}})
        said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        return {**whole, "text": said}
    parts: dict[int, _Part] = {}
    usage: Mapping[str, Any] = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            parts.setdefault(choice["index"], _Part()).add(choice)
    return {"choices": [part.values() for _, part in sorted(parts.items())], "usage": _usage(usage)}


def _usage(usage: Mapping[str, Any]) -> tuple[int, int]:
    return int(usage.get("prompt_tokens", -1)), int(usage.get("completion_tokens", -1))


@dataclass(slots=True)
class _Part:
    """Accumulates one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish: str = "no end"

    def add(self, choice: Mapping[str, Any]) -> "_Part":
        said = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or said.get("content") or ""
        self.token_ids += choice.get("token_ids") or ()
        self.scores += (choice.get("logprobs") or {}).get("token_logprobs") or ()
        for i, call in enumerate(said.get("tool_calls") or ()):
            name_and_arguments = self.calls.setdefault(call.get("index", i), ["", ""])
            function = call.get("function") or {}
            name_and_arguments[0] += function.get("name") or ""
            name_and_arguments[1] += function.get("arguments") or ""
        self.finish = choice.get("finish_reason") or self.finish
        return self

    def values(self) -> Normal:
        # The last digits of a log-probability depend on the batch composition.
        scores = [round(score, 2) for score in self.scores]
        return {
            "text": self.text, "token_ids": self.token_ids, "scores": scores, "calls": sorted(self.calls.items()), "finish": self.finish,
        }  # fmt: skip
