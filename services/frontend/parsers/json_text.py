"""JSON that comes in pieces: forwarded as it comes, or read."""

import json
import re
from collections.abc import Collection, Generator

import orjson

from services.frontend.parsers.feed import HELD_CHARACTERS_MAX, Emit, Feed, Found, Interrupted, Malformed, Steps, ToPart
from services.frontend.parsers.parts import TRUNCATED

_IN_STRING = r'["\\\x00-\x1f]'
_OUTSIDE = r'["{}\[\]]'
_QUOTES_AND_ESCAPES = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_BLANKS = re.compile(r"\s*")
_BEHIND_STRING = (",", ":", "}", "]")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]")
_CLOSING = {"{": "}", "[": "]"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_HEXADECIMAL = re.compile(r"[0-9A-Fa-f]{4}\Z")


# `json.dumps` with arguments makes an encoder each time.
_encode = json.JSONEncoder(ensure_ascii=False).encode


def quoted(text: str) -> str:
    """A JSON string, with its quotes."""
    return _encode(text)


def inner(text: str) -> str:
    """A piece of a JSON string. Pieces may be joined, since each character stands for itself."""
    return _encode(text)[1:-1]


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def stream_container(feed: Feed, emit: Emit, to_part: ToPart | None = None) -> Steps:
    """An object or array at the cursor, handed out as it comes. `to_part`: see `Feed.wait_quickly`.

    Control characters inside strings, which JSON forbids and models write, are escaped. Brackets that do not match are
    malformed. A mark of the family interrupts the document, unless it is text of a string (see `string_goes_on`).
    """
    open_brackets: list[str] = []
    is_string = False
    text_until = 0
    patterns = (feed.stops.combined_with(_OUTSIDE), feed.stops.combined_with(_IN_STRING))
    while True:
        pattern, beginnings = patterns[is_string]
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
                text_until = feed.at + (yield from string_goes_on(feed, len(character)))
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
    feed: Feed, mark_characters: int, quote: str = '"', behind: Collection[str] = _BEHIND_STRING
) -> Generator[None, None, int]:
    """For a mark at the cursor, inside a string: how many characters remain to the string's end. Raises Interrupted if the
    string was never finished.

    The mark is text of the string if the next quote ends a string, which is seen by what stands behind it. After an
    unfinished string the next quote, if any, begins one: of the next call, or in text.
    """
    ahead = mark_characters
    while ahead <= HELD_CHARACTERS_MAX:
        found = _QUOTES_AND_ESCAPES[quote].search(feed.text, feed.at + ahead)
        ahead = (found.start() if found is not None else len(feed.text)) - feed.at
        if found is not None and found.group() == "\\":
            if len(feed.text) - feed.at - ahead >= 2:
                ahead += 2
                continue
        elif found is not None:
            next_at = _skip_blanks(feed.text, found.end())
            if next_at - feed.at > HELD_CHARACTERS_MAX:
                break
            if next_at < len(feed.text) or feed.is_over:
                if feed.text[next_at : next_at + 1] in ("", *behind):
                    return ahead
                break
        if feed.is_over:
            break
        yield
    raise Interrupted


def _skip_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None, "the pattern matches nothing too"
    return found.end()


def _hand_out(feed: Feed, end: int, emit: Emit) -> None:
    text, feed.at = feed.text[feed.at : end], end
    if text:
        emit(text)


def stream_string(feed: Feed, emit: Emit) -> Steps:
    """The characters of a JSON string at the cursor, escapes resolved, handed out as they come. For marks see
    `stream_container`."""
    yield from feed.expect('"')
    pattern, _ = feed.stops.combined_with(_IN_STRING)
    text_until = 0
    while True:
        end = len(feed.text) if feed.is_over else feed.stops.held(feed.text, feed.at)
        found = pattern.search(feed.text, feed.at, end)
        if found is None:
            _hand_out(feed, end, emit)
            if feed.is_over:
                raise Malformed(TRUNCATED)
            yield
            text_until = 0
            continue
        _hand_out(feed, found.start(), emit)
        character = found.group()
        if character == '"':
            feed.at += 1
            return
        if character == "\\":
            emit((yield from _escape(feed)))
            continue
        if len(character) > 1 and feed.at >= text_until:
            text_until = feed.at + (yield from string_goes_on(feed, len(character)))
        _hand_out(feed, feed.at + len(character), emit)


def _escape(feed: Feed) -> Found:
    yield from feed.wait(2)
    letter = feed.text[feed.at + 1]
    if letter != "u":
        if letter not in _ESCAPES:
            raise Malformed
        feed.at += 2
        return _ESCAPES[letter]
    unit = yield from _unit(feed)
    if not 0xD800 <= unit < 0xDC00:
        # A lone second half of a pair is no character.
        return "\N{REPLACEMENT CHARACTER}" if 0xDC00 <= unit < 0xE000 else chr(unit)
    if not (yield from feed.has("\\u")):
        return "\N{REPLACEMENT CHARACTER}"
    feed.at -= 2
    second = yield from _unit(feed)
    if not 0xDC00 <= second < 0xE000:
        return "\N{REPLACEMENT CHARACTER}" + (
            chr(second) if not 0xD800 <= second < 0xE000 else "\N{REPLACEMENT CHARACTER}"
        )
    return chr(0x10000 + (unit - 0xD800) * 0x400 + (second - 0xDC00))


def _unit(feed: Feed) -> Generator[None, None, int]:
    yield from feed.wait(6)
    digits = feed.text[feed.at + 2 : feed.at + 6]
    if not _HEXADECIMAL.match(digits):
        raise Malformed
    feed.at += 6
    return int(digits, 16)


def take_string(feed: Feed, characters_max: int = HELD_CHARACTERS_MAX) -> Found:
    """A whole JSON string."""
    pieces: list[str] = []
    yield from stream_string(feed, feed.hold(pieces, characters_max))
    return "".join(pieces)


def stream_value(feed: Feed, emit: Emit) -> Steps:
    """Any JSON value at the cursor, as JSON text."""
    character = yield from feed.peek()
    if character in ("{", "["):
        yield from stream_container(feed, emit)
    elif character == '"':
        emit('"')
        yield from stream_string(feed, lambda text: emit(inner(text)))
        emit('"')
    else:
        emit((yield from take_scalar(feed)))


def take_scalar(feed: Feed) -> Found:
    """A number, true, false or null."""
    text = yield from feed.take_while(_SCALAR)
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        at_end = feed.is_over and feed.at == len(feed.text)
        raise Malformed("tool_call_truncated" if at_end else "tool_call_malformed") from None
    return text
