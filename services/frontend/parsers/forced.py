"""Answers to requests that force calls: only calls, as JSON to which the engine's grammar constrains the model.

They have no marks, whatever the model's own format is, and no reasoning: the grammar applies from the first token on.
"""

import re

from services.frontend.parsers.family import WholeFamily
from services.frontend.parsers.feed import Feed, Malformed, Steps
from services.frontend.parsers.json_call import CallShape, read_json_call, stream_arguments
from services.frontend.parsers.parts import TRUNCATED

_OPENING = re.compile(r'(\{\s*"?)?')
_SHAPE = CallShape(arguments=("parameters",))


def named_family(name: str) -> WholeFamily:
    """Returns the family of an answer that consists of the arguments of one call of this function."""

    def read(feed: Feed) -> Steps:
        try:
            yield from feed.skip_blanks()
            yield from _wait_argument(feed)
            feed.begin_call(name)
            yield from stream_arguments(feed)
        except Malformed as error:
            _end(feed, error)
        yield from _rest(feed)

    return WholeFamily(name="named", reader=read, special_marks=())


def _read_list(feed: Feed) -> Steps:
    try:
        yield from feed.skip_blanks()
        yield from feed.expect("[")
        while True:
            yield from read_json_call(feed, _SHAPE)
            yield from feed.skip_blanks()
            if not (yield from feed.has(",")):
                break
        yield from feed.expect("]")
        feed.settle()
    except Malformed as error:
        _end(feed, error)
    yield from _rest(feed)


def _wait_argument(feed: Feed) -> Steps:
    """Waits for more than the beginning of an empty object: an answer that was cut off there contains no call."""
    while _OPENING.fullmatch(feed.text, feed.at):
        if feed.is_over:
            raise Malformed(TRUNCATED)
        yield


def _end(feed: Feed, error: Malformed) -> None:
    """Handles text that could not be read. The beginning of a call that was cut off is dropped; other text is content."""
    if error.reason != TRUNCATED:
        feed.reject(error.reason)
        return
    feed.at = len(feed.text)
    feed.settle()
    feed.drop_blanks()
    feed.warn(TRUNCATED)


def _rest(feed: Feed) -> Steps:
    """Delivers what follows the document as content: blanks, or text if the engine's grammar failed."""
    while True:
        feed.at = len(feed.text)
        feed.reject("")
        if feed.is_over:
            return
        yield


LIST_FAMILY = WholeFamily(name="list", reader=_read_list, special_marks=())
"""An answer that is a list of calls, `[{"name": ..., "parameters": {...}}, ...]`, as in vLLM."""
