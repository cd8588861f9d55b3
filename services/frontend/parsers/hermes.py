"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`."""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import Feed, Malformed, Steps
from services.frontend.parsers.json_call import read_json_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _read(feed: Feed) -> Steps:
    yield from read_json_call(feed)
    yield from close_call(feed, CLOSE, OPEN)


def close_call(feed: Feed, close: str, following: str) -> Steps:
    """The closing mark of a whole call. Models leave it out where they stop, and before the next call."""
    yield from feed.skip_blanks()
    if (yield from feed.has(close)):
        return
    if (yield from feed.has(following)):
        feed.at -= len(following)
    elif (yield from feed.peek()):
        raise Malformed


FAMILY = ToolFamily(name="hermes", readers={OPEN: _read}, closing_marks=(CLOSE,), template_marks=(OPEN,))
