"""Calls written as a JSON object: `{"name": "get_weather", "arguments": {"city": "Paris"}}`, keys in any order."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Emit, Feed, Found, Interrupted, Malformed, Steps, ToPart
from services.frontend.parsers.json_text import is_object, stream_container, stream_string, stream_value, take_string
from services.frontend.parsers.parts import ARGUMENTS_MALFORMED, MALFORMED, TRUNCATED, UNKNOWN_TOOL, Part

ID_KEYS = ("id", "tool_call_id")
_OTHER_KEYS = ("type", "index", "description")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a family writes the object.

    `is_bare`: no mark says that it is a call, so it is one only if it has a name that the request knows, its arguments, and
    no key that calls do not have.
    """

    names: Sequence[str] = ("name",)
    arguments: Sequence[str] = ("arguments", "parameters")
    is_bare: bool = False


HERMES_SHAPE = Shape()
BARE_SHAPE = Shape(is_bare=True)


@dataclass(slots=True)
class _JsonCall:
    """What is known of a call while its object is read. `held`: arguments that came before the name."""

    name: str = ""
    call_id: str = ""
    held: str | None = None
    has_begun: bool = False


def read_json_call(feed: Feed, shape: Shape = HERMES_SHAPE) -> Steps:
    """One object at the cursor."""
    call = _JsonCall()
    try:
        yield from _read_object(feed, shape, call)
    except Malformed as error:
        if shape.is_bare and not call.name and not call.has_begun:
            raise Malformed("") from error
        raise
    feed.settle()


def _read_object(feed: Feed, shape: Shape, call: _JsonCall) -> Steps:
    yield from feed.skip_blanks()
    if shape.is_bare or (yield from feed.peek()) != '"':
        yield from feed.expect("{")
        yield from feed.skip_blanks()
    is_first = True
    while not (yield from feed.has("}")):
        if not is_first:
            if (yield from feed.is_at_mark()):
                # The closing brace is missing, or the arguments are not whole.
                break
            yield from feed.expect(",")
            yield from feed.skip_blanks()
        is_first = False
        key = yield from take_string(feed, NAME_CHARACTERS_MAX)
        yield from feed.skip_blanks()
        yield from feed.expect(":")
        yield from feed.skip_blanks()
        yield from _read_member(feed, shape, call, key)
        yield from feed.skip_blanks()
    _finish(feed, shape, call)


def _read_member(feed: Feed, shape: Shape, call: _JsonCall, key: str) -> Steps:
    if key in shape.names and not call.name:
        call.name = yield from take_string(feed, NAME_CHARACTERS_MAX)
        if not call.name:
            raise Malformed
        if shape.is_bare and feed.tools and call.name not in feed.tools:
            raise Malformed(UNKNOWN_TOOL)
    elif key in shape.arguments and not call.has_begun and call.held is None:
        yield from _read_arguments(feed, call)
    elif key in ID_KEYS and not call.call_id and (yield from feed.peek()) == '"':
        call.call_id = yield from take_string(feed, NAME_CHARACTERS_MAX)
    elif shape.is_bare and key not in _OTHER_KEYS and key not in ID_KEYS:
        raise Malformed("")
    else:
        yield from stream_value(feed, feed.hold([]))


def _finish(feed: Feed, shape: Shape, call: _JsonCall) -> None:
    if call.has_begun:
        return
    if not call.name or (shape.is_bare and call.held is None):
        raise Malformed("" if shape.is_bare else MALFORMED)
    feed.begin_call(call.name, call.call_id)
    feed.add_arguments(call.held or "{}")


def _read_arguments(feed: Feed, call: _JsonCall) -> Steps:
    character = yield from feed.peek()
    if not call.name:
        pieces: list[str] = []
        yield from _document(feed, character, feed.hold(pieces))
        call.held = "".join(pieces)
        return
    if character not in ("{", '"', "n"):
        raise Malformed(MALFORMED if character else TRUNCATED)
    feed.begin_call(call.name, call.call_id)
    call.has_begun = True
    yield from stream_arguments(feed)


def stream_arguments(feed: Feed) -> Steps:
    """The arguments of the call just begun, at the cursor: an object, a string that holds one, or null. A mark of the family
    ends them even where they are not whole; it stays."""
    said: list[str] = []

    def emit(text: str) -> None:
        said.append(text)
        feed.add_arguments(text)

    def to_part(text: str) -> Part:
        said.append(text)
        return feed.to_arguments(text)

    with suppress(Interrupted):
        yield from _document(feed, (yield from feed.peek()), emit, to_part)
    if not is_object("".join(said)):
        feed.warn(ARGUMENTS_MALFORMED)


def take_object(feed: Feed) -> Found:
    """A whole JSON object at the cursor."""
    pieces: list[str] = []
    yield from stream_container(feed, feed.hold(pieces))
    document = "".join(pieces)
    if not is_object(document):
        raise Malformed
    return document


def _document(feed: Feed, character: str, emit: Emit, to_part: ToPart | None = None) -> Steps:
    if character == '"':
        yield from stream_string(feed, emit)
    elif character == "n":
        yield from feed.expect("null")
        emit("{}")
    elif character == "{":
        yield from stream_container(feed, emit, to_part)
    else:
        raise Malformed(MALFORMED if character else TRUNCATED)
