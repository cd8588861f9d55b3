"""Reasoning and tool calls over HTTP, with parsers that are detected from the model's files."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from kvmesh.clock import SystemClock
from kvmesh.errors import UnsupportedError
from services.frontend.models import ServedModel
from services.frontend.settings import FrontendSettings
from services.frontend.text.text_model import load_text_model
from tests.frontend_mesh import TEMPLATE, FakeMesh, served_model, tokens_of, write_model
from tests.integration.test_frontend_http import CHAT, MESSAGES, Running, content, frontend

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
BODY: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def write(directory: Path, *, template: str = TEMPLATE, special: Sequence[str] = ()) -> Path:
    """Writes the test model with another template and additional special tokens."""
    write_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    return directory


@asynccontextmanager
async def answering(directory: Path, answer: str, **settings: Any) -> AsyncIterator[Running]:
    """Runs a frontend whose model always gives the same answer."""
    text = load_text_model(directory, SystemClock(), **settings)
    model: ServedModel = served_model(directory, text=text, vocabulary_size=1000)
    tokens = tokens_of(text, answer)
    async with frontend([model], FakeMesh(answer=lambda _: tokens)) as running:
        yield running


def deltas(events: Sequence[Any]) -> list[dict[str, Any]]:
    return [event["choices"][0]["delta"] for event in events if event != "[DONE]" and event["choices"]]


async def test_reasoning_whole_and_streamed(tmp_path: Path) -> None:
    """`reasoning_content` is separate from the content, and usage counts its tokens. The opening mark may be in the prompt."""
    directory = write(tmp_path, template=TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}")
    async with answering(directory, "Let me see.\n</think>\n\nParis.") as running:
        _, whole, _ = await running.post(CHAT, BODY | {"tools": []})
        message = whole["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Paris.")
        counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        thoughts = len(tokens_of(running.pipeline.models.find("tiny").text, "Let me see.\n", ends=False))
        assert abs(counted - thoughts) <= 1, "the closing mark's tokens may share a token with the text"
        asked = BODY | {"tools": [], "stream_options": {"include_usage": True}}
        events = await running.events(CHAT, asked)
        assert "".join(each.get("reasoning_content", "") for each in deltas(events)) == "Let me see."
        assert content(events) == "Paris."
        assert len([each for each in deltas(events) if "reasoning_content" in each]) > 2, "the reasoning was buffered"
        assert events[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] == counted


async def test_reasoning_can_be_excluded(tmp_path: Path) -> None:
    """With `include_reasoning` false, reasoning is still parsed and counted, but not returned."""
    async with answering(write(tmp_path, template=TEMPLATE + "{# <think> #}"), "<think>Hm.</think>Paris.") as running:
        asked = BODY | {"include_reasoning": False}
        _, whole, _ = await running.post(CHAT, asked)
        assert whole["choices"][0]["message"]["content"] == "Paris."
        assert "reasoning_content" not in whole["choices"][0]["message"]
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert not any("reasoning_content" in each for each in deltas(await running.events(CHAT, asked)))


async def test_a_continued_message_may_be_in_the_middle_of_reasoning(tmp_path: Path) -> None:
    """The parser finds the opening mark in the prompt, however long ago it was."""
    async with answering(write(tmp_path, template=TEMPLATE + "{# <think> #}"), " so.</think>Paris.") as running:
        asked = BODY | {"continue_final_message": True, "add_generation_prompt": False}
        for begun, reasoning, expected_text in (
            ("<think>" + "word " * 50, "so.", "Paris."),
            ("<think>Hm.</think>It is", None, " so.</think>Paris."),
        ):
            messages = [*MESSAGES, {"role": "assistant", "content": begun}]
            _, whole, _ = await running.post(CHAT, asked | {"messages": messages})
            message = whole["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (reasoning, expected_text)


async def test_arguments_stream(tmp_path: Path) -> None:
    """A call's name comes first, then its arguments piece by piece. OpenAI's client assembles them."""
    long = " ".join(["one two three"] * 20)
    answer = f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{long}"}}}}\n</tool_call>'
    async with answering(write(tmp_path), answer) as running:
        calls = [each["tool_calls"][0] for each in deltas(await running.events(CHAT, BODY)) if "tool_calls" in each]
        assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
        assert calls[0]["id"].startswith("call_") and calls[0]["type"] == "function"
        assert len(calls) > 20 and all(set(each) == {"index", "function"} for each in calls[1:])
        assert json.loads("".join(each["function"]["arguments"] for each in calls)) == {"city": long}
        async with (
            openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
            client.chat.completions.stream(**BODY) as stream,
        ):
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls and json.loads(final.message.tool_calls[0].function.arguments) == {"city": long}


async def test_malformed_calls_are_content_with_a_warning(tmp_path: Path) -> None:
    """Whole answers have the warning in a header, streams in a field of the last event."""
    async with answering(write(tmp_path), "Well. <tool_call>oops</tool_call>") as running:
        _, whole, headers = await running.post(CHAT, BODY)
        assert whole["choices"][0]["message"]["content"] == "Well. <tool_call>oops</tool_call>"
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert headers["X-Kvmesh-Warning"] == "tool_call_malformed"
        events = await running.events(CHAT, BODY)
        assert content(events) == "Well. <tool_call>oops</tool_call>"
        assert events[-2]["warnings"] == ["tool_call_malformed"]
    async with answering(write(tmp_path), HERMES) as running:
        _, _, headers = await running.post(CHAT, BODY)
        assert "X-Kvmesh-Warning" not in headers
        assert all("warnings" not in event for event in (await running.events(CHAT, BODY))[:-1])


async def test_a_call_cut_off_at_max_tokens(tmp_path: Path) -> None:
    """The finish reason is `length`, and the call has the partial arguments."""
    async with answering(write(tmp_path), HERMES) as running:
        text = running.pipeline.models.find("tiny").text
        count = len(tokens_of(text, HERMES[: HERMES.index("aris")], ends=False))
        _, whole, headers = await running.post(CHAT, BODY | {"max_tokens": count})
        choice = whole["choices"][0]
        assert choice["finish_reason"] == "length"
        assert '{"city": "Paris"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])
        assert headers["X-Kvmesh-Warning"] == "tool_call_truncated"


async def test_marks_that_are_special_tokens_reach_the_parser(tmp_path: Path) -> None:
    """Other special tokens stay out of the text. Ids of calls have the length that the template requires."""
    directory = write(
        tmp_path, template=TEMPLATE + "{# [TOOL_CALLS] #}", special=["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<odd>"]
    )
    answer = 'Hm.<odd>[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
    async with answering(directory, answer) as running:
        _, whole, _ = await running.post(CHAT, BODY)
        message = whole["choices"][0]["message"]
        assert message["content"] == "Hm."
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        assert len(message["tool_calls"][0]["id"]) == 9 and message["tool_calls"][0]["id"].isalnum()
        _, plain, _ = await running.post(CHAT, BODY | {"tools": []})
        assert plain["choices"][0]["message"]["content"] == 'Hm.get_weather{"city": "Paris"}'


async def test_quotes_that_are_special_tokens(tmp_path: Path) -> None:
    """Gemma's calls and reasoning use special tokens as quotes."""
    marks = ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|odd|>"]
    directory = write(tmp_path, template=TEMPLATE + "{# <|tool_call>call: <|channel> #}", special=marks)
    call = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
    async with answering(directory, "<|channel>thought\nHm.<channel|>Well.<|odd|>" + call) as running:
        _, whole, _ = await running.post(CHAT, BODY)
        message = whole["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Well.")
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris", "days": 3}


async def test_harmony(tmp_path: Path) -> None:
    """Channels are never shown: one answer is split into reasoning, content and calls, with and without tools."""
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]
    directory = write(tmp_path, template=TEMPLATE + "{# <|channel|> #}", special=marks)
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
    answer = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant" + call
    async with answering(directory, answer) as running:
        _, whole, _ = await running.post(CHAT, BODY)
        message = whole["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Look.", None)
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    async with answering(directory, "<|channel|>final<|message|>Hello one two") as running:
        events = await running.events(CHAT, BODY | {"tools": []})
        assert content(events) == "Hello one two"


@pytest.mark.parametrize(
    ("addition", "special", "settings", "tools", "reasoning", "problem"),
    [
        ("<tool_call>", (), {}, "hermes", None, ""),
        ("", (), {}, "hermes", None, ""),  # The tokenizer has <tool_call>.
        ("<tool_call><think></think>", (), {}, "hermes", "qwen3", ""),
        ("<tool_call> <function=", (), {}, "qwen3_coder", None, ""),
        ("<arg_key> <tool_call> <think>", (), {}, "glm45", "glm45", ""),
        ("<|tool_calls_section_begin|> <think>", (), {}, "kimi_k2", "kimi", ""),
        ("[TOOL_CALLS] [THINK]", (), {}, "mistral", "mistral", ""),
        ("<|python_tag|>", (), {}, "llama3_json", None, ""),
        ("[func_name1(params_name1=params_value1", (), {}, "pythonic", None, ""),
        ("<|channel|>", (), {}, "harmony", "harmony", ""),
        ("<｜tool▁calls▁begin｜>", (), {}, "deepseek_v3", None, ""),
        ("", ("｜DSML｜",), {}, "deepseek_v3_2", None, ""),
        ("<|tool_call>call: <|channel>", (), {}, "gemma", "gemma", ""),
        ("<minimax:tool_call> <think>", (), {}, "minimax_m2", "minimax_m2", ""),
        ("<|tool_call|>", (), {"tool_parser": "granite4"}, "hermes", None, ""),
        ("<tool_call>", (), {"tool_parser": "mistral"}, "mistral", None, "the tool parser mistral does not fit"),
        (
            "<tool_call>",
            (),
            {"reasoning_parser": "qwen3"},
            "hermes",
            "qwen3",
            "the reasoning parser qwen3 does not fit",
        ),
        ("<tool_call>", (), {"tool_parser": "none"}, None, None, ""),
        ("<think>", (), {"reasoning_parser": "none"}, "hermes", None, ""),
        ("<tool_call>", (), {"tool_parser": "openai"}, "harmony", None, "the tool parser openai does not fit"),
    ],
)
async def test_parsers_are_detected_and_reported(
    tmp_path: Path, addition: str, special: Sequence[str], settings: dict[str, str], tools: str, reasoning: str, problem: str
) -> None:  # fmt: skip
    """Parsers are detected from the template and the tokens. /v1/models reports a configured parser that does not fit the model."""
    directory = write(tmp_path, template=TEMPLATE + "{#" + addition + "#}", special=special)
    async with (
        answering(directory, "x", **settings) as running,
        running.session.get(f"{running.url}/v1/models") as response,
    ):
        found = (await response.json())["data"][0]["parsers"]
    assert (found["tool_parser"], found["reasoning_parser"]) == (tools, reasoning)
    assert [each[: len(problem)] for each in found["problems"]] == ([problem] if problem else [])


def test_unknown_parsers_are_refused() -> None:
    """The error names the setting, and no service starts."""
    with pytest.raises(ValueError, match="tool_parser: there is no tool parser 'nope'"):
        FrontendSettings(tool_parser="a=hermes,b=nope")
    with pytest.raises(ValueError, match="reasoning_parser: there is no reasoning parser"):
        FrontendSettings(reasoning_parser="nope")
    names = FrontendSettings(tool_parser="a=hermes, b=mistral").parser_names
    assert [names.tool_parser(each) for each in "abc"] == ["hermes", "mistral", "auto"]


def test_the_error_for_an_unknown_parser_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"known parsers: .*hermes.*mistral"):
        load_text_model(write(tmp_path), SystemClock(), tool_parser="nope")


FORCED = '[{"name": "get_weather", "parameters": {"city": "Paris"}}'


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_forced_call_ends_when_it_is_complete(tmp_path: Path, is_stream: bool) -> None:
    """The model would generate blanks up to max_tokens. The leg is cancelled, and the answer ends with the call."""
    model = served_model(write(tmp_path), features=frozenset({"structured_output"}))
    tokens = tokens_of(model.text, FORCED + " " * 300, ends=False)
    body = {**BODY, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
    async with frontend([model], FakeMesh(answer=lambda _: tokens)) as running:
        if is_stream:
            events = await running.events(CHAT, {**body, "stream_options": {"include_usage": True}})
            assert content(events) == ""
            calls = [call for each in deltas(events) for call in each.get("tool_calls", [])]
            arguments = "".join(call["function"]["arguments"] for call in calls)
            reason, usage = events[-3]["choices"][0]["finish_reason"], events[-2]["usage"]
        else:
            _, whole, _ = await running.post(CHAT, body)
            message = whole["choices"][0]["message"]
            assert message["content"] is None
            arguments = message["tool_calls"][0]["function"]["arguments"]
            reason, usage = whole["choices"][0]["finish_reason"], whole["usage"]
        assert (reason, json.loads(arguments)) == ("tool_calls", {"city": "Paris"})
        assert usage["completion_tokens"] <= len(tokens_of(model.text, FORCED)) + 1
        assert len(running.mesh.cancelled) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_forced_call_that_was_cut_off_at_its_start(tmp_path: Path, choice: Any) -> None:
    """The answer has no call and no text, whole and streamed. A complete call before it is kept."""
    model = served_model(write(tmp_path), features=frozenset({"structured_output"}))
    beginnings = ['[{"', "[", FORCED + ', {"name'] if choice == "required" else ['{"', "{"]
    for text in beginnings:
        tokens = tokens_of(model.text, text, ends=False)
        body = {**BODY, "tool_choice": choice, "max_tokens": len(tokens)}
        async with frontend([model], FakeMesh(answer=lambda _, tokens=tokens: tokens)) as running:
            _, whole, _ = await running.post(CHAT, body)
            message = whole["choices"][0]["message"]
            assert not message["content"] and len(message.get("tool_calls", [])) == text.count("}}")
            assert whole["choices"][0]["finish_reason"] == "length"
            events = await running.events(CHAT, body)
            assert content(events) == ""
            assert any("tool_calls" in each for each in deltas(events)) == ("}}" in text)
