"""Apertus: `<|tools_prefix|>[{"name": {...}}, ...]<|tools_suffix|>`: the function's name is the key of its arguments."""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Feed, Steps
from services.frontend.parsers.json_call import stream_arguments
from services.frontend.parsers.json_text import take_string
from services.frontend.parsers.readers import close_call

OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"


def _read(feed: Feed) -> Steps:
    yield from feed.skip_blanks()
    yield from feed.expect("[")
    yield from feed.skip_blanks()
    if (yield from feed.has("]")):
        feed.settle()
    else:
        yield from _read_calls(feed)
    yield from close_call(feed, CLOSE)


def _read_calls(feed: Feed) -> Steps:
    while True:
        yield from _read_object(feed)
        feed.settle()
        yield from feed.skip_blanks()
        if not (yield from feed.has(",")):
            break
        yield from feed.skip_blanks()
    if (yield from feed.peek()) and not (yield from feed.is_at_mark()):
        yield from feed.expect("]")


def _read_object(feed: Feed) -> Steps:
    """Reads one call or, where the model puts them into one object, several."""
    yield from feed.expect("{")
    while True:
        yield from feed.skip_blanks()
        name = yield from take_string(feed, NAME_CHARACTERS_MAX)
        yield from feed.skip_blanks()
        yield from feed.expect(":")
        yield from feed.skip_blanks()
        if (yield from feed.peek()) not in ("{", "n") or not name:
            raise feed.unexpected()
        feed.begin_call(name)
        yield from stream_arguments(feed)
        yield from feed.skip_blanks()
        if (yield from feed.is_at_mark()):
            return
        if not (yield from feed.has(",")):
            yield from feed.expect("}")
            return


FAMILY = ToolFamily(
    name="apertus",
    readers={OPEN: _read},
    closing_marks=(CLOSE,),
    hidden_marks=(OPEN, CLOSE),
    template_marks=(OPEN,),
)
