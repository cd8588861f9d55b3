"""Tool choices become constraints, and forced answers are parsed, whole and in pieces."""

import json
from random import Random
from typing import Any

import jsonschema
import pytest

from kvmesh.core import Constraint, ConstraintKind, SamplingParams
from kvmesh.engines.simulated.documents.tags import make_tagged
from kvmesh.errors import InvalidRequestError, UnsupportedError
from services.frontend.parsers.call_tags import CALL_TAGS
from services.frontend.parsers.parser import AnswerParser, answer_parser
from services.frontend.parsers.parts import CallArguments, CallBegin, Warned
from services.frontend.parsers.tables import TOOL_FAMILIES
from services.frontend.pipeline.call_end import BLANKS_MAX, make_stop_finder
from services.frontend.pipeline.request import Conversation, Request, ToolChoice, ToolMode
from services.frontend.pipeline.tool_choice import forced_family, with_tool_constraint

POINT = {"$defs": {"p": {"type": "integer"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/p"}}}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {})}}


def request_with(choice: ToolChoice, *tools: dict[str, Any], **sampling: Any) -> Request:
    prompt = Conversation(messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice=choice)
    fields = {"constraint": "response_format"} if "constraint" in sampling else {}
    return Request(request_id="r", model="m", prompt=prompt, sampling=SamplingParams(**sampling), fields=fields)


def schema_of(request: Request) -> Any:
    constraint = with_tool_constraint(request, TOOL_FAMILIES["hermes"]).sampling.constraint
    assert constraint is not None and constraint.kind is ConstraintKind.JSON_SCHEMA
    return json.loads(constraint.text)


def test_required_allows_any_tool_with_its_own_arguments() -> None:
    """The schema allows any tool with its own arguments, whose references resolve to their definitions, and refuses those of another tool."""
    schema = schema_of(request_with(ToolChoice(mode=ToolMode.REQUIRED), tool("go", POINT), tool("stop")))
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid([{"name": "go", "parameters": {"x": 1}}, {"name": "stop", "parameters": {}}])
    assert not validator.is_valid([{"name": "go", "parameters": {"x": "far"}}])
    assert not validator.is_valid([{"name": "fly", "parameters": {}}])
    assert not validator.is_valid([])
    one = schema_of(request_with(ToolChoice(mode=ToolMode.REQUIRED, is_parallel=False), tool("stop")))
    assert not jsonschema.Draft202012Validator(one).is_valid([{"name": "stop", "parameters": {}}] * 2)


def test_named_uses_the_tools_own_schema() -> None:
    """A named choice uses the tool's own schema, or an object if the tool has none."""
    choice = ToolChoice(mode=ToolMode.NAMED, name="go")
    assert schema_of(request_with(choice, tool("stop"), tool("go", POINT))) == POINT
    assert schema_of(request_with(choice, tool("go")))["type"] == "object"


def test_contradictions_are_refused() -> None:
    """Two tools with different definitions of one name are refused, and so are a strict tool and a response format.

    A forced call replaces a response format.
    """
    other = {**POINT, "$defs": {"p": {"type": "string"}}}
    with pytest.raises(InvalidRequestError) as caught:
        schema_of(request_with(ToolChoice(mode=ToolMode.REQUIRED), tool("a", POINT), tool("b", other)))
    assert caught.value.field == "tools"
    for parameters in ({"$defs": 0.5}, {"description": "x" * 300_000}):
        with pytest.raises(InvalidRequestError) as caught:
            schema_of(request_with(ToolChoice(mode=ToolMode.REQUIRED), tool("a", parameters)))
        assert caught.value.field == "tools"
    constraint = Constraint(kind=ConstraintKind.JSON_OBJECT)
    forced = request_with(ToolChoice(mode=ToolMode.NAMED, name="a"), tool("a"), constraint=constraint)
    assert schema_of(forced)["type"] == "object"
    strict = request_with(ToolChoice(strict=("a",)), tool("a"), constraint=constraint)
    with pytest.raises(InvalidRequestError):
        with_tool_constraint(strict, TOOL_FAMILIES["hermes"])


def test_strict_tools_require_a_family_with_tags() -> None:
    """Strict tools become structural tags. A family without tags is refused with the tool's field."""
    request = request_with(ToolChoice(strict=("b",)), tool("a"), tool("b", POINT))
    constraint = with_tool_constraint(request, TOOL_FAMILIES["hermes"]).sampling.constraint
    assert constraint is not None and constraint.kind is ConstraintKind.STRUCTURAL_TAG
    tags = json.loads(constraint.text)["format"]["tags"]
    assert [tag["content"]["json_schema"] for tag in tags] == [{"type": "object"}, POINT]
    with pytest.raises(UnsupportedError) as caught:
        with_tool_constraint(request, TOOL_FAMILIES["pythonic"])
    assert caught.value.field == "tools[1].function.strict"


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 2}, "days": {"type": "integer"}, "deep": {"type": "object"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("family", sorted(CALL_TAGS))
@pytest.mark.parametrize("is_parallel", [True, False])
def test_strict_calls_are_parsed(family: str, is_parallel: bool) -> None:
    """The family's parser finds a call with valid arguments in any text that the tag allows."""
    choice = ToolChoice(strict=("go",), is_parallel=is_parallel)
    constraint = with_tool_constraint(
        request_with(choice, tool("go", WEATHER)), TOOL_FAMILIES[family]
    ).sampling.constraint
    assert constraint is not None
    counts = set()
    for seed in range(30):
        text = make_tagged(json.loads(constraint.text), Random(seed))
        calls, content, warnings = calls_of(
            answer_parser(TOOL_FAMILIES[family], None, functions={"go": WEATHER}), [text]
        )
        assert not warnings and not content.strip(), text
        for name, arguments in calls:
            assert name == "go"
            jsonschema.validate(json.loads(arguments), WEATHER)
        counts.add(len(calls))
    assert counts == {1} if not is_parallel else max(counts) > 1


def test_auto_and_no_tools_add_no_constraint() -> None:
    """A request with the mode auto, or without tools, stays the same."""
    for request in (request_with(ToolChoice(), tool("a")), request_with(ToolChoice(mode=ToolMode.REQUIRED))):
        assert with_tool_constraint(request, None) is request


LIST = '[{"name": "go", "parameters": {"x": [1, {"y": "a\\"b ü"}]}}, {"name": "stop", "parameters": {}}]'
ARGUMENTS = '{"x": [1, {"y": "a\\"b ü"}]}'


def read(choice: ToolChoice, pieces: list[str]) -> tuple[list[tuple[str, str]], str, list[str]]:
    """Parses the pieces. Returns calls as (name, arguments), the content, and the warnings."""
    return calls_of(answer_parser(forced_family(choice), None), pieces)


def calls_of(parser: AnswerParser, pieces: list[str]) -> tuple[list[tuple[str, str]], str, list[str]]:
    """Parses the pieces with `parser`. Returns calls, content and warnings."""
    parts = [part for piece in pieces for part in parser.push(piece)] + list(parser.flush())
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    arguments = [""] * len(names)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.number] += part.text
    content = "".join(part for part in parts if isinstance(part, str))
    return list(zip(names, arguments, strict=True)), content, [p.reason for p in parts if isinstance(p, Warned)]


@pytest.mark.parametrize(
    ("choice", "text", "calls"),
    [
        (ToolChoice(mode=ToolMode.REQUIRED), LIST, [("go", ARGUMENTS), ("stop", "{}")]),
        (ToolChoice(mode=ToolMode.REQUIRED), " \n" + LIST.replace(",", " ,\n") + "\n ", None),
        (ToolChoice(mode=ToolMode.NAMED, name="go"), ARGUMENTS, [("go", ARGUMENTS)]),
        (ToolChoice(mode=ToolMode.NAMED, name="go"), "\n" + ARGUMENTS + "\n", [("go", ARGUMENTS)]),
        (ToolChoice(mode=ToolMode.REQUIRED), LIST[:40], None),
        (ToolChoice(mode=ToolMode.NAMED, name="go"), ARGUMENTS[:9], [("go", ARGUMENTS[:9])]),
        (ToolChoice(mode=ToolMode.REQUIRED), "I will not.", []),
        (ToolChoice(mode=ToolMode.REQUIRED), "", []),
    ],
)  # fmt: skip
def test_forced_answers_are_parsed_the_same_in_any_pieces(choice: ToolChoice, text: str, calls: Any) -> None:
    """Splitting at any point, and into characters, gives the same calls and content, and drops nothing."""
    whole = read(choice, [text])
    if calls is not None:
        assert whole[0] == calls
    assert read(choice, list(text)) == whole
    for at in range(len(text)):
        assert read(choice, [text[:at], text[at:]]) == whole


def test_an_engine_that_ignores_the_constraint_gives_content() -> None:
    """Text instead of calls is content, with a warning."""
    calls, content, warnings = read(ToolChoice(mode=ToolMode.REQUIRED), ["I will not."])
    assert (calls, content) == ([], "I will not.") and warnings


@pytest.mark.parametrize("mode", [ToolMode.REQUIRED, ToolMode.NAMED])
def test_a_truncated_call_is_not_text(mode: ToolMode) -> None:
    """Wherever the answer is truncated, no punctuation becomes text, and complete calls and those whose name was returned stay calls."""
    choice = ToolChoice(mode=mode, name="go" if mode is ToolMode.NAMED else "")
    text = LIST if mode is ToolMode.REQUIRED else ARGUMENTS
    whole, _, _ = read(choice, [text])
    for at in range(len(text)):
        calls, content, warnings = read(choice, list(text[:at]))
        assert content == "", text[:at]
        assert [name for name, _ in calls] == [name for name, _ in whole][: len(calls)]
        assert all(whole[i][1].startswith(arguments) for i, (_, arguments) in enumerate(calls))
        assert warnings
    for beginning in ("", "{", '{"', '{ "', "[", "[ {", '[{"', '[{"name": "g'):
        if beginning[:1] in ("", "[" if mode is ToolMode.REQUIRED else "{"):
            assert read(choice, [beginning])[:2] == ([], "")


def ended(text: str, mode: ToolMode, *, is_parallel: bool = True, stop: str = "") -> tuple[str, str | None]:
    """Splits the text into pieces of several sizes. Returns the text for the client and the matched stop, which must not depend on the size."""
    found = set()
    for size in (1, 2, 7, len(text)):
        choice = ToolChoice(mode=mode, name="a", is_parallel=is_parallel)
        finder = make_stop_finder(request_with(choice, tool("a"), stop=(stop,) if stop else ()))
        assert finder is not None
        shown = "".join([finder.push(text[at : at + size]) for at in range(0, len(text), size)])
        shown += finder.flush() if finder.matched is None else ""
        found.add((shown, finder.matched))
    (only,) = found
    return only


CALL = '{"name": "a", "parameters": {"x": "} ] \\" , \\\\", "y": [ 1, { } ] }  }'


def test_whitespace_after_the_last_call_ends_the_answer() -> None:
    """Whitespace ends the answer immediately where no call can follow, and between calls only if it is longer than any layout needs."""
    single, several = (False, ToolMode.REQUIRED), (True, ToolMode.REQUIRED)
    for is_parallel, mode, text in (
        (*single, f"[ {CALL}"), (*single, f"[{CALL}]"), (*several, f"[{CALL}]"), (*several, f"[\n{CALL}\n,\n{CALL}\n]"),
        (True, ToolMode.NAMED, CALL), (False, ToolMode.NAMED, CALL),
    ):  # fmt: skip
        assert ended(text + " " * 500, mode, is_parallel=is_parallel) == (text, "")
        assert ended(text, mode, is_parallel=is_parallel) == (text, None)
    kept = f"[{CALL}" + " " * BLANKS_MAX
    assert ended(kept + " " * 500, ToolMode.REQUIRED) == (kept, "")
    assert ended(f"{kept},{CALL}]", ToolMode.REQUIRED) == (f"{kept},{CALL}]", None)


def test_other_answers_are_not_ended() -> None:
    """Text instead of calls, incomplete calls, and answers that are not forced or have a minimum length do not end early. Stop strings work."""
    for text in ("I will {not} go. ", CALL[:-3] + " " * 500, '"a" b'):
        assert ended(text, ToolMode.NAMED) == (text, None)
    assert ended(CALL + "  ", ToolMode.NAMED, stop='"y"') == (CALL.partition('"y"')[0], '"y"')
    for request in (
        request_with(ToolChoice(), tool("a")),
        request_with(ToolChoice(mode=ToolMode.REQUIRED)),
        request_with(ToolChoice(mode=ToolMode.REQUIRED), tool("a"), min_tokens=5),
    ):
        assert make_stop_finder(request) is None
