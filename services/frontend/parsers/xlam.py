"""xLAM: `[{"name": ..., "arguments": {...}}, ...]` without marks, in a fence of Markdown, or after the marks of Hermes or Mistral.

Without marks a list contains calls if its first element has the keys of a call and names a function of the request.
"""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import Feed, Malformed, Steps
from services.frontend.parsers.json_call import BARE_SHAPE, read_json_call
from services.frontend.parsers.json_lists import json_reader, read_list

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FENCE = "```"
_MISTRAL = "TOOL_CALLS]"


def _read_bare(feed: Feed) -> Steps:
    """Continues after a bracket."""
    if (yield from feed.has(_MISTRAL)):
        yield from feed.skip_blanks()
        yield from feed.expect("[")
    yield from _read_calls(feed)


def _read_calls(feed: Feed) -> Steps:
    """Reads a list from after its bracket."""
    yield from feed.skip_blanks()
    if (yield from feed.peek()) not in ("{", ""):
        raise Malformed("")
    yield from read_json_call(feed, BARE_SHAPE)
    yield from feed.skip_blanks()
    if (yield from feed.has(",")):
        yield from read_list(feed)
    elif (yield from feed.peek()) and not (yield from feed.is_at_mark()):
        yield from feed.expect("]")


def _read_fence(feed: Feed) -> Steps:
    yield from feed.has("json")
    yield from feed.skip_blanks()
    if not (yield from feed.has("[")):
        raise Malformed("")
    yield from _read_calls(feed)
    feed.settle()
    yield from feed.skip_blanks()
    if not (yield from feed.has(_FENCE)):
        feed.reject("")


FAMILY = ToolFamily(
    name="xlam",
    readers={OPEN: json_reader(opening=OPEN, closing=CLOSE), _FENCE: _read_fence, "[": _read_bare},
    closing_marks=(CLOSE,),
    template_marks=("Salesforce xLAM",),
)
