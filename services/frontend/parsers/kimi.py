"""Kimi K2: `<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
<|tool_calls_section_end|>`. The text before the arguments is the call's id, which Kimi's template wants back."""

import json
from collections.abc import Mapping
from typing import Any

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Feed, Malformed, Steps
from services.frontend.parsers.json_call import stream_arguments, take_object
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parts import MALFORMED, TRUNCATED
from services.frontend.parsers.readers import read_section

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_HEAD_ENDS = Marks((ARGUMENTS, CALL_END, SECTION_END, CALL))


def _read_section(feed: Feed) -> Steps:
    yield from read_section(feed, CALL, _read_call, SECTION_END)


def _read_call(feed: Feed) -> Steps:
    head = (yield from feed.take_until(_HEAD_ENDS, NAME_CHARACTERS_MAX)).strip()
    yield from feed.expect(ARGUMENTS)
    name = head.partition(":")[0].removeprefix("functions.")
    if not head:
        raise Malformed
    if not name or (name.isdigit() and name not in feed.tools):
        yield from _read_nameless(feed)
        return
    yield from feed.skip_blanks()
    if (yield from feed.peek()) != "{":
        raise Malformed(MALFORMED if (yield from feed.peek()) else TRUNCATED)
    feed.begin_call(name, head if ":" in head else "")
    yield from stream_arguments(feed)
    yield from _close(feed)


def _close(feed: Feed) -> Steps:
    yield from feed.skip_blanks()
    if (yield from feed.has(CALL_END)) or (yield from feed.is_at_mark()):
        return
    if (yield from feed.peek()):
        raise Malformed


def _read_nameless(feed: Feed) -> Steps:
    """A call that has a number for a name: its arguments say which function of the request it is."""
    yield from feed.skip_blanks()
    document = yield from take_object(feed)
    names = [name for name, schema in feed.tools.items() if _fits(document, schema)]
    if len(feed.tools) == 1:
        names = [*feed.tools]
    if len(names) != 1:
        raise Malformed
    feed.begin_call(names[0])
    feed.add_arguments(document)
    yield from _close(feed)


def _fits(document: str, schema: Mapping[str, Any]) -> bool:
    keys = {*json.loads(document)}
    return {*(schema.get("required") or ())} <= keys <= {*(schema.get("properties") or ())}


FAMILY = ToolFamily(
    name="kimi_k2",
    readers={SECTION: _read_section, CALL: _read_call},
    closing_marks=(SECTION_END, CALL_END, ARGUMENTS),
    hidden_marks=(SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS),
    template_marks=(SECTION, CALL),
    gives_call_ids=True,
)
