"""Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, several separated by `;`, with or without `<|python_tag|>`.

Without the mark any `{` may begin a call; it does if the object has the keys of a call and names a function of the request.
"""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import Feed, Reader, Steps
from services.frontend.parsers.json_call import BARE_SHAPE, HERMES_SHAPE, CallShape, read_json_call

PYTHON_TAG = "<|python_tag|>"


def _reader(mark: str, shape: CallShape) -> Reader:
    def read(feed: Feed) -> Steps:
        if mark == "{":
            feed.at -= 1
        yield from read_json_call(feed, shape)
        while True:
            yield from feed.skip_blanks()
            if not (yield from feed.has(";")):
                break
            yield from feed.skip_blanks()
            if (yield from feed.peek()) != "{":
                break
            # The call before was delivered, so a malformed one does not affect it.
            yield from read_json_call(feed, shape)
        feed.reject("")

    return read


FAMILY = ToolFamily(
    name="llama3_json",
    readers={PYTHON_TAG: _reader(PYTHON_TAG, HERMES_SHAPE), "{": _reader("{", BARE_SHAPE)},
    hidden_marks=(PYTHON_TAG,),
    template_marks=(PYTHON_TAG, '"parameters": dictionary of argument name and its value', "<|start_header_id|>"),
)
