"""Calls written as a JSON object: `{"name": "get_weather", "arguments": {"city": "Paris"}}`, keys in any order."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from services.frontend.parsers.feed import (
    NAME_CHARACTERS_MAX,
    Emit,
    Feed,
    Interrupted,
    Malformed,
    Steps,
    TextSteps,
    ToPart,
)
from services.frontend.parsers.json_text import is_object, stream_container, stream_string, stream_value, take_string
from services.frontend.parsers.parts import ARGUMENTS_MALFORMED, MALFORMED, UNKNOWN_TOOL, Part

ID_KEYS = ("id", "tool_call_id")
_OTHER_KEYS = ("type", "index", "description")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """How a family writes the object.

    `is_bare`: no mark shows that the object is a call, so it is one only if it has a name that the request knows, arguments,
    and no key that calls do not have.
    """

    names: Sequence[str] = ("name",)
    arguments: Sequence[str] = ("arguments", "parameters")
    is_bare: bool = False


HERMES_SHAPE = CallShape()
BARE_SHAPE = CallShape(is_bare=True)


@dataclass(slots=True, kw_only=True)
class _JsonCall:
    """The members of a call's object that were read. `held`: arguments that came before the name."""

    name: str = ""
    call_id: str = ""
    held: str | None = None
    has_begun: bool = False


def read_json_call(feed: Feed, shape: CallShape = HERMES_SHAPE) -> Steps:
    """Reads one object at the cursor. Models may omit its opening brace."""
    call = _JsonCall()
    try:
        yield from feed.skip_blanks()
        if shape.is_bare or (yield from feed.peek()) != '"':
            yield from feed.expect("{")
            yield from feed.skip_blanks()
        is_first = True
        while not (yield from feed.has("}")):
            if not is_first:
                if (yield from feed.is_at_mark()):
                    # The closing brace is missing, or the arguments are incomplete.
                    break
                yield from feed.expect(",")
                yield from feed.skip_blanks()
            is_first = False
            yield from _read_member(feed, shape, call)
            yield from feed.skip_blanks()
        if not call.has_begun:
            if not call.name or (shape.is_bare and call.held is None):
                raise Malformed("" if shape.is_bare else MALFORMED)
            feed.begin_call(call.name, call.call_id)
            feed.add_arguments(call.held or "{}")
    except Malformed as error:
        # Without a name it is not a call but text, so the client gets no warning.
        if shape.is_bare and not call.name:
            raise Malformed("") from error
        raise
    feed.settle()


def _read_member(feed: Feed, shape: CallShape, call: _JsonCall) -> Steps:
    key = yield from take_string(feed, NAME_CHARACTERS_MAX)
    yield from feed.skip_blanks()
    yield from feed.expect(":")
    yield from feed.skip_blanks()
    if key in shape.names and not call.name:
        call.name = yield from take_string(feed, NAME_CHARACTERS_MAX)
        if not call.name:
            raise Malformed
        if shape.is_bare and feed.tools and call.name not in feed.tools:
            raise Malformed(UNKNOWN_TOOL)
    elif key in shape.arguments and not call.has_begun and call.held is None:
        character = yield from feed.peek()
        if not call.name:
            pieces: list[str] = []
            yield from _stream_document(feed, character, feed.hold(pieces))
            call.held = "".join(pieces)
        elif character in ("{", '"', "n"):
            feed.begin_call(call.name, call.call_id)
            call.has_begun = True
            yield from stream_arguments(feed)
        else:
            raise feed.unexpected()
    elif key in ID_KEYS and not call.call_id and (yield from feed.peek()) == '"':
        call.call_id = yield from take_string(feed, NAME_CHARACTERS_MAX)
    elif shape.is_bare and key not in _OTHER_KEYS and key not in ID_KEYS:
        raise Malformed("")
    else:
        # Reads and drops a member without meaning. `hold` limits its length.
        yield from stream_value(feed, feed.hold([]))


def stream_arguments(feed: Feed) -> Steps:
    """Delivers the arguments of the call just begun, at the cursor: an object, a string that contains one, or null.

    A mark of the family ends them even if they are incomplete; the mark is not consumed.
    """
    pieces, emit, to_part = recorded_arguments(feed)
    with suppress(Interrupted):
        yield from _stream_document(feed, (yield from feed.peek()), emit, to_part=to_part)
    if not is_object("".join(pieces)):
        feed.warn(ARGUMENTS_MALFORMED)


def recorded_arguments(feed: Feed) -> tuple[list[str], Emit, ToPart]:
    """Returns functions that deliver arguments, and the list in which they record the text."""
    pieces: list[str] = []

    def emit(text: str) -> None:
        pieces.append(text)
        feed.add_arguments(text)

    def to_part(text: str) -> Part:
        pieces.append(text)
        return feed.to_arguments(text)

    return pieces, emit, to_part


def take_object(feed: Feed) -> TextSteps:
    """Returns a whole JSON object at the cursor."""
    pieces: list[str] = []
    yield from stream_container(feed, feed.hold(pieces))
    document = "".join(pieces)
    if not is_object(document):
        raise Malformed
    return document


def _stream_document(feed: Feed, character: str, emit: Emit, *, to_part: ToPart | None = None) -> Steps:
    if character == '"':
        yield from stream_string(feed, emit)
    elif character == "n":
        yield from feed.expect("null")
        emit("{}")
    elif character == "{":
        yield from stream_container(feed, emit, to_part)
    else:
        raise feed.unexpected()
