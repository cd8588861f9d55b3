"""Mistral.

Up to v7 `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, from v11 `[TOOL_CALLS]name{...}` once per call, with
`[CALL_ID]id` and `[ARGS]` between name and arguments from v13 on.
"""

import re

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import Feed, Steps
from services.frontend.parsers.json_call import read_json_call, stream_arguments
from services.frontend.parsers.json_lists import read_list

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.\-/:]")
_ID = re.compile(r"\w")


def _read(feed: Feed) -> Steps:
    yield from feed.skip_blanks()
    if (yield from feed.peek()) == "{":
        yield from read_json_call(feed)
    elif (yield from feed.has("[")):
        yield from read_list(feed)
    else:
        yield from _read_named(feed)


def _read_named(feed: Feed) -> Steps:
    name = yield from feed.take_while(_NAME)
    if not name:
        raise feed.unexpected()
    call_id = (yield from feed.take_while(_ID)) if (yield from feed.has(CALL_ID)) else ""
    yield from feed.has(ARGUMENTS)
    yield from feed.skip_blanks()
    if (yield from feed.peek()) != "{":
        raise feed.unexpected()
    feed.begin_call(name, call_id)
    yield from stream_arguments(feed)


FAMILY = ToolFamily(
    name="mistral",
    readers={OPEN: _read},
    closing_marks=(CALL_ID, ARGUMENTS),
    template_marks=(OPEN,),
    call_id_characters=9,
)
