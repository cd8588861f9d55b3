"""Kimi K2: `<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
<|tool_calls_section_end|>`. The text before the arguments is the call's id; Kimi's template needs it in the next turn."""

import json
from collections.abc import Mapping
from typing import Any

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Feed, Malformed, Steps
from services.frontend.parsers.json_call import stream_arguments, take_object
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.readers import close_call, section_reader

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_HEAD_ENDS = Marks((ARGUMENTS, CALL_END, SECTION_END, CALL))


def _read_call(feed: Feed) -> Steps:
    head = (yield from feed.take_until(_HEAD_ENDS, NAME_CHARACTERS_MAX)).strip()
    yield from feed.expect(ARGUMENTS)
    if not head:
        raise Malformed
    yield from feed.skip_blanks()
    name = head.partition(":")[0].removeprefix("functions.")
    if not name or (name.isdigit() and name not in feed.tools):
        document = yield from take_object(feed)
        feed.begin_call(_function_with(document, feed.tools))
        feed.add_arguments(document)
    else:
        if (yield from feed.peek()) != "{":
            raise feed.unexpected()
        feed.begin_call(name, head if ":" in head else "")
        yield from stream_arguments(feed)
    yield from close_call(feed, CALL_END)


def _function_with(document: str, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the function of a call that has a number for a name: the only one that takes these arguments."""
    keys = {*json.loads(document)}
    names = [
        name
        for name, schema in tools.items()
        if len(tools) == 1 or {*(schema.get("required") or ())} <= keys <= {*(schema.get("properties") or ())}
    ]
    if len(names) != 1:
        raise Malformed
    return names[0]


FAMILY = ToolFamily(
    name="kimi_k2",
    readers={SECTION: section_reader(CALL, _read_call, SECTION_END), CALL: _read_call},
    closing_marks=(SECTION_END, CALL_END, ARGUMENTS),
    hidden_marks=(SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS),
    template_marks=(SECTION, CALL),
    gives_call_ids=True,
)
