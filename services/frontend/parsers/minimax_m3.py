"""MiniMax M3: calls as XML in which each tag follows the token `]<]minimax[>[`, shown as `§` here:
`§<tool_call>§<invoke name="name">§<key>value§</key>§</invoke>§</tool_call>`.

A parameter is an element named after it. Elements nest: children make an object or, where the schema says so, a list.
"""

import json
from collections.abc import Generator, Mapping
from typing import Any

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Feed, Malformed, Steps, TextSteps, ValueEnds
from services.frontend.parsers.invoke import end_tag, read_attribute
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parameters import (
    TEXT,
    begin_parameter,
    end_parameters,
    schema_types,
    stream_value,
    to_json,
)
from services.frontend.parsers.parts import TRUNCATED
from services.frontend.parsers.python_text import DEPTH_MAX
from services.frontend.parsers.readers import section_reader

TOKEN = "]<]minimax[>["
SECTION, SECTION_END = f"{TOKEN}<tool_call>", f"{TOKEN}</tool_call>"
INVOKE, INVOKE_END = f"{TOKEN}<invoke name=", f"{TOKEN}</invoke>"
_VALUE_ENDS = ValueEnds(TOKEN)
# The first character of TOKEN: TOKEN itself contains another mark, which would be found first while TOKEN is incomplete.
_NAME_ENDS = Marks((">", "<", TOKEN[0]))
_MIXED_TEXT = "$text"


def _read_call(feed: Feed) -> Steps:
    function = yield from read_attribute(feed)
    yield from end_tag(feed)
    feed.begin_call(function)
    properties = feed.tools.get(function, {}).get("properties") or {}
    while True:
        yield from feed.skip_blanks()
        if (yield from feed.has(INVOKE_END)) or (yield from feed.is_at_mark()):
            break
        name = yield from _opening_tag(feed)
        yield from _stream_parameter(feed, name, properties.get(name))
        feed.settle()
    end_parameters(feed)


def _opening_tag(feed: Feed) -> TextSteps:
    yield from feed.expect(f"{TOKEN}<")
    name = (yield from feed.take_until(_NAME_ENDS, NAME_CHARACTERS_MAX)).strip()
    yield from feed.expect(">")
    if not name or name.startswith("/"):
        raise Malformed
    return name


def _stream_parameter(feed: Feed, name: str, schema: Any) -> Steps:
    """Delivers text as it comes; other values when they are whole."""
    begin_parameter(feed, name)
    if schema_types(schema) == TEXT:
        yield from stream_value(feed, _VALUE_ENDS, TEXT)
        yield from feed.has(_closing_tag(name))
        return
    try:
        value = yield from _read_element(feed, name, schema, depth=0)
    except Malformed as error:
        if error.reason == TRUNCATED:
            feed.at = len(feed.text)
            feed.add_arguments(feed.text[feed.kept :].replace(TOKEN, ""))
        raise
    feed.add_arguments(json.dumps(value, ensure_ascii=False))


def _closing_tag(name: str) -> str:
    return f"{TOKEN}</{name}>"


def _read_element(feed: Feed, name: str, schema: Any, *, depth: int) -> Generator[None, None, Any]:
    """Returns the value of an element, from after its opening tag to after its closing one, which may be missing."""
    if depth >= DEPTH_MAX:
        raise Malformed
    text = yield from feed.take_until(_VALUE_ENDS.marks)
    children: list[tuple[str, Any]] = []
    types, inner = schema_types(schema), schema if isinstance(schema, Mapping) else {}
    while not (yield from feed.has(_closing_tag(name))) and not (yield from feed.is_at_mark()):
        child = yield from _opening_tag(feed)
        child_schema = inner.get("items") if "array" in types else (inner.get("properties") or {}).get(child)
        children.append((child, (yield from _read_element(feed, child, child_schema, depth=depth + 1))))
        text += yield from feed.take_until(_VALUE_ENDS.marks)
    if not children:
        return _leaf(text, types)
    if "array" in types:
        return [value for _, value in children]
    return _object([*children, (_MIXED_TEXT, text)] if text.strip() else children)


def _leaf(text: str, types: frozenset[str]) -> Any:
    # The template writes an empty list or object as an empty element.
    if not text.strip() and "string" not in types and types & {"array", "object"}:
        return [] if "array" in types else {}
    return json.loads(to_json(text, types or TEXT))


def _object(children: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object. Children with the same name become a list."""
    values: dict[str, list[Any]] = {}
    for name, value in children:
        values.setdefault(name, []).append(value)
    return {name: each[0] if len(each) == 1 else each for name, each in values.items()}


FAMILY = ToolFamily(
    name="minimax_m3",
    readers={SECTION: section_reader(INVOKE, _read_call, SECTION_END)},
    closing_marks=(SECTION_END, INVOKE, INVOKE_END),
    mark_tokens=(TOKEN,),
    hidden_marks=(SECTION, SECTION_END, INVOKE, INVOKE_END),
    template_marks=(TOKEN,),
)
