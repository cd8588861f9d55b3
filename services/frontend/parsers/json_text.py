"""Reads JSON that comes in pieces, and forwards it as it comes."""

import json
import re
from collections.abc import Callable, Collection, Generator

import orjson

from services.frontend.parsers.feed import (
    HELD_CHARACTERS_MAX,
    BoolSteps,
    Emit,
    Feed,
    Interrupted,
    Malformed,
    Steps,
    TextSteps,
    ToPart,
)
from services.frontend.parsers.parts import TRUNCATED

_IN_STRING = r'["\\\x00-\x1f]'
_OUTSIDE = r'["{}\[\]]'
_QUOTES_AND_ESCAPES = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_BLANKS = re.compile(r"\s*")
_AFTER_STRING = (",", ":", "}", "]")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]")
_CLOSING = {"{": "}", "[": "]"}
# `json.dumps` with arguments creates an encoder each time.
_encode = json.JSONEncoder(ensure_ascii=False).encode


def quoted(text: str) -> str:
    """Returns a JSON string, with its quotes."""
    return _encode(text)


def inner(text: str) -> str:
    """Returns a piece of a JSON string. Pieces may be joined, because each character is encoded separately."""
    return _encode(text)[1:-1]


def is_object(text: str) -> bool:
    """Returns whether a text is a JSON object."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def stream_container(feed: Feed, emit: Emit, to_part: ToPart | None = None) -> Steps:
    """Emits an object or array at the cursor as it comes. `to_part`: see `Feed.wait_quickly`.

    Escapes control characters inside strings, which JSON forbids and models write. Raises Malformed for brackets that do not
    match, Interrupted at a mark of the family that is not text of a string (see `string_goes_on`).
    """
    open_brackets: list[str] = []
    is_string = False
    # Up to this position marks are text of the string.
    text_until = 0
    patterns = (feed.stops.combined_with(_OUTSIDE), feed.stops.combined_with(_IN_STRING))
    while True:
        # Brackets count only outside of strings.
        pattern, beginnings = patterns[is_string]
        # The search ends before text that may become a mark.
        end = len(feed.text) if feed.is_over else feed.stops.held(feed.text, feed.at)
        found = pattern.search(feed.text, feed.at, end)
        if found is None:
            _hand_out(feed, end, emit)
            if feed.is_over:
                raise Malformed(TRUNCATED)
            yield from feed.wait_quickly(beginnings, to_part)
            text_until = 0
            continue
        _hand_out(feed, found.start(), emit)
        character = found.group()
        if len(character) > 1:
            if not is_string:
                raise Interrupted
            if feed.at >= text_until:
                # Not in one expression: while it waits, the cursor moves back with the text that was delivered.
                ahead = yield from string_goes_on(feed, len(character))
                text_until = feed.at + ahead
            _hand_out(feed, feed.at + len(character), emit)
        elif character == "\\":
            yield from feed.wait(2)
            _hand_out(feed, feed.at + 2, emit)
        elif character == '"':
            is_string = not is_string
            _hand_out(feed, feed.at + 1, emit)
        elif is_string:
            feed.at += 1
            emit(inner(character))
        elif character in "{[":
            open_brackets.append(_CLOSING[character])
            _hand_out(feed, feed.at + 1, emit)
        else:
            if not open_brackets or open_brackets[-1] != character:
                raise Malformed
            open_brackets.pop()
            _hand_out(feed, feed.at + 1, emit)
            if not open_brackets:
                return


def string_goes_on(
    feed: Feed, mark_characters: int, quote: str = '"', *, after: Collection[str] = _AFTER_STRING
) -> Generator[None, None, int]:
    """Returns the number of characters up to the end of a string, for a mark at the cursor inside the string.

    The mark is text of the string if the next quote ends a string, which the characters after it show (`after`). After an
    unfinished string the next quote, if any, begins one: of the next call, or in text. Then it raises Interrupted.
    """
    ahead = mark_characters
    while ahead <= HELD_CHARACTERS_MAX:
        found = _QUOTES_AND_ESCAPES[quote].search(feed.text, feed.at + ahead)
        ahead = (found.start() if found is not None else len(feed.text)) - feed.at
        if found is not None and found.group() == "\\":
            # The backslash, and the character that it escapes.
            if len(feed.text) - feed.at - ahead >= 2:
                ahead += 2
                continue
        elif found is not None:
            next_at = _skip_blanks(feed.text, found.end())
            if next_at - feed.at > HELD_CHARACTERS_MAX:
                break
            if next_at < len(feed.text) or feed.is_over:
                # An empty text is the end of the answer.
                if feed.text[next_at : next_at + 1] in ("", *after):
                    return ahead
                break
        if feed.is_over:
            break
        yield
    raise Interrupted


def _skip_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None, "the pattern matches the empty string"
    return found.end()


def _hand_out(feed: Feed, end: int, emit: Emit) -> None:
    text, feed.at = feed.text[feed.at : end], end
    if text:
        emit(text)


def stream_string(feed: Feed, emit: Emit) -> Steps:
    """Emits the characters of a JSON string at the cursor as they come, with escapes resolved."""
    yield from feed.expect('"')
    yield from stream_quoted(feed, emit, '"', read_escape=_read_escape)


def stream_quoted(
    feed: Feed,
    emit: Emit,
    quote: str,
    *,
    read_escape: Callable[[Feed], TextSteps],
    is_end: Callable[[Feed], BoolSteps] | None = None,
    after: Collection[str] = _AFTER_STRING,
) -> Steps:
    """Emits the characters of a string as they come, from after its opening quote to after its closing one.

    `read_escape` is called at a backslash; `is_end` at a quote, to say whether it ends the string. `after`: see
    `string_goes_on`, which decides about marks.
    """
    pattern, _ = feed.stops.combined_with(rf"[{quote}\\]")
    text_until = 0
    while True:
        end = len(feed.text) if feed.is_over else feed.stops.held(feed.text, feed.at)
        found = pattern.search(feed.text, feed.at, end)
        _hand_out(feed, found.start() if found else end, emit)
        if found is None:
            if feed.is_over:
                raise Malformed(TRUNCATED)
            yield
            text_until = 0
            continue
        word = found.group()
        if word == quote:
            if is_end is None or (yield from is_end(feed)):
                feed.at += 1
                return
            _hand_out(feed, feed.at + 1, emit)
        elif word == "\\":
            emit((yield from read_escape(feed)))
        else:
            if feed.at >= text_until:
                ahead = yield from string_goes_on(feed, len(word), quote, after=after)
                text_until = feed.at + ahead
            _hand_out(feed, feed.at + len(word), emit)


def _read_escape(feed: Feed) -> TextSteps:
    """Reads one escape, or the two of a surrogate pair. A lone surrogate becomes U+FFFD."""
    yield from feed.wait(2)
    length = 6 if feed.text[feed.at + 1] == "u" else 2
    yield from feed.wait(length)
    text = _resolved(feed.text[feed.at : feed.at + length])
    feed.at += length
    if "\ud800" <= text <= "\udbff" and (yield from feed.has("\\u")):
        # `has` has consumed the first two characters of the second escape.
        feed.at -= 2
        yield from feed.wait(6)
        text += _resolved(feed.text[feed.at : feed.at + 6])
        feed.at += 6
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _resolved(escape: str) -> str:
    try:
        return str(json.loads(f'"{escape}"'))
    except json.JSONDecodeError:
        raise Malformed from None


def take_string(feed: Feed, characters_max: int = HELD_CHARACTERS_MAX) -> TextSteps:
    """Returns a whole JSON string."""
    pieces: list[str] = []
    yield from stream_string(feed, feed.hold(pieces, characters_max))
    return "".join(pieces)


def stream_value(feed: Feed, emit: Emit) -> Steps:
    """Emits any JSON value at the cursor, as JSON text."""
    character = yield from feed.peek()
    if character in ("{", "["):
        yield from stream_container(feed, emit)
    elif character == '"':
        emit('"')
        yield from stream_string(feed, lambda text: emit(inner(text)))
        emit('"')
    else:
        emit((yield from take_scalar(feed)))


def take_scalar(feed: Feed) -> TextSteps:
    """Returns a number, true, false or null."""
    text = yield from feed.take_while(_SCALAR)
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        raise feed.unexpected() from None
    return text
