"""The Hermes parser: whole, and split at every point."""

import json

import pytest

from services.frontend.tools import HermesParser, ParsedCall, Part

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NESTED = '<tool_call>{"name":"f","arguments":{"a":{"b":[1,{"c":"</tool"}]},"t":"<tool_call>"}}</tool_call>'
ARGUMENTS = {"city": "Paris"}

SAMPLES: list[tuple[str, str, list[tuple[str, object]]]] = [
    ("plain text", "plain text", []),
    ("", "", []),
    ("   \n", "   \n", []),
    (CALL, "", [("get_weather", ARGUMENTS)]),
    ("\n" + CALL + "\n", "", [("get_weather", ARGUMENTS)]),
    ("I look it\n\nup.\n" + CALL, "I look it\n\nup.", [("get_weather", ARGUMENTS)]),
    (CALL + "\n" + CALL, "", [("get_weather", ARGUMENTS), ("get_weather", ARGUMENTS)]),
    (CALL + " and more", " and more", [("get_weather", ARGUMENTS)]),
    (NESTED, "", [("f", {"a": {"b": [1, {"c": "</tool"}]}, "t": "<tool_call>"})]),
    ('<tool_call>{"name":"ü","arguments":{"日":"🙂"}}</tool_call>', "", [("ü", {"日": "🙂"})]),
    ('<tool_call>{"name":"f"}</tool_call>', "", [("f", {})]),
    # Stopped right after the JSON, or in the middle of it.
    ('<tool_call>\n{"name": "f", "arguments": {}}', "", [("f", {})]),
    ('<tool_call>\n{"name": "f", "argu', '<tool_call>\n{"name": "f", "argu', []),
    # Looks like a call and is none.
    ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ('<tool_call>{"arguments":{}}</tool_call>', '<tool_call>{"arguments":{}}</tool_call>', []),
    ('<tool_call>{"name":"f","arguments":[1]}</tool_call>', '<tool_call>{"name":"f","arguments":[1]}</tool_call>', []),
    ("a <tool b <tool_cal", "a <tool b <tool_cal", []),
    ("</tool_call> alone", "</tool_call> alone", []),
]


def read(parts: list[Part]) -> tuple[str, list[tuple[str, object]]]:
    content = "".join(part for part in parts if isinstance(part, str))
    calls = [part for part in parts if isinstance(part, ParsedCall)]
    assert [call.index for call in calls] == list(range(len(calls)))
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("text", "content", "calls"), SAMPLES)
def test_whole_and_at_every_split(text: str, content: str, calls: list[tuple[str, object]]) -> None:
    """The parts do not depend on how the text came."""
    splits = [[text], list(text)] + [[text[:i], text[i:]] for i in range(len(text))]
    for pieces in splits:
        parser = HermesParser()
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
        assert read(parts) == (content, calls), pieces


def test_content_is_shown_at_once() -> None:
    """Only blanks and what may still be a mark wait."""
    parser = HermesParser()
    assert parser.push("I will <") == ["I will"]
    assert parser.push("b>") == [" <b>"]
