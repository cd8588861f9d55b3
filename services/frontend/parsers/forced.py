"""Answers whose form the request forces: nothing but calls, as JSON that the engine's grammar keeps to.

They have no marks, whatever the model's own format is, and no reasoning: the grammar begins with the first token.
"""

import re

from services.frontend.parsers.family import WholeFamily
from services.frontend.parsers.feed import Feed, Malformed, Steps
from services.frontend.parsers.json_call import Shape, read_json_call, stream_arguments
from services.frontend.parsers.parts import TRUNCATED

_OPENING = re.compile(r'(\{\s*"?)?')
LIST_SHAPE = Shape(arguments=("parameters",))


def named_family(name: str) -> WholeFamily:
    """The answer is the arguments of one call of this function."""

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
            yield from read_json_call(feed, LIST_SHAPE)
            yield from feed.skip_blanks()
            if not (yield from feed.has(",")):
                break
        yield from feed.expect("]")
        feed.settle()
    except Malformed as error:
        _end(feed, error)
    yield from _rest(feed)


def _wait_argument(feed: Feed) -> Steps:
    """Until there is more than the beginning of an empty object: an answer that was cut off there is no call."""
    while not feed.is_over and _OPENING.fullmatch(feed.text, feed.at):
        yield
    if feed.is_over and _OPENING.fullmatch(feed.text, feed.at):
        raise Malformed(TRUNCATED)


def _end(feed: Feed, error: Malformed) -> None:
    """Reading ended early. What was cut off is the beginning of a call, not text; what is no call at all is text."""
    if error.reason != TRUNCATED:
        feed.reject(error.reason)
        return
    feed.at = len(feed.text)
    feed.settle()
    feed.drop_blanks()
    feed.warn(TRUNCATED)


def _rest(feed: Feed) -> Steps:
    """What the engine lets follow the document: blanks, or, where its grammar failed, text."""
    while True:
        feed.at = len(feed.text)
        feed.reject("")
        if feed.is_over:
            return
        yield


LIST_FAMILY = WholeFamily(name="list", reader=_read_list, special_marks=())
"""The answer is a list of calls, `[{"name": ..., "parameters": {...}}, ...]`, as vLLM forces it."""
