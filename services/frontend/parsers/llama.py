"""Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, several separated by `;`, with or without `<|python_tag|>`.

Without the mark any `{` may be a call; it is one if it has the keys of a call and names a function of the request.
"""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import Feed, Steps
from services.frontend.parsers.json_call import BARE_SHAPE, HERMES_SHAPE, Shape, read_json_call

PYTHON_TAG = "<|python_tag|>"


def _read_marked(feed: Feed) -> Steps:
    yield from _read_several(feed, HERMES_SHAPE)


def _read_bare(feed: Feed) -> Steps:
    yield from read_json_call_at_brace(feed, BARE_SHAPE)
    yield from _read_rest(feed, BARE_SHAPE)


def read_json_call_at_brace(feed: Feed, shape: Shape) -> Steps:
    """An object whose brace was taken as the mark."""
    feed.at -= 1
    yield from read_json_call(feed, shape)


def _read_several(feed: Feed, shape: Shape) -> Steps:
    yield from read_json_call(feed, shape)
    yield from _read_rest(feed, shape)


def _read_rest(feed: Feed, shape: Shape) -> Steps:
    """The calls behind the first: each is one for itself, so that what is no call takes no other with it."""
    while True:
        yield from feed.skip_blanks()
        if (yield from feed.has(";")):
            yield from feed.skip_blanks()
            if (yield from feed.peek()) == "{":
                yield from read_json_call(feed, shape)
                continue
        feed.reject("")
        return


FAMILY = ToolFamily(
    name="llama3_json",
    readers={PYTHON_TAG: _read_marked, "{": _read_bare},
    hidden_marks=(PYTHON_TAG,),
    template_marks=(PYTHON_TAG, '"parameters": dictionary of argument name and its value', "<|start_header_id|>"),
)
