"""JSON that comes in pieces: forwarded as it comes, or read."""

import json
import re
from collections.abc import Generator

import orjson

from services.frontend.parsers.feed import HELD_CHARACTERS_MAX, Emit, Feed, Found, Malformed, Steps, ToPart
from services.frontend.parsers.parts import TRUNCATED

_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE = re.compile(r'["{}\[\]]')
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
    malformed; what else is wrong with the document is not looked at here.
    """
    open_brackets: list[str] = []
    is_string = False
    while True:
        pattern = _IN_STRING if is_string else _OUTSIDE
        found = pattern.search(feed.text, feed.at)
        if found is None:
            _hand_out(feed, len(feed.text), emit)
            if feed.is_over:
                raise Malformed(TRUNCATED)
            yield from feed.wait_quickly(pattern, to_part)
            continue
        _hand_out(feed, found.start(), emit)
        character = found.group()
        if character == "\\":
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


def _hand_out(feed: Feed, end: int, emit: Emit) -> None:
    text, feed.at = feed.text[feed.at : end], end
    if text:
        emit(text)


def stream_string(feed: Feed, emit: Emit) -> Steps:
    """The characters of a JSON string at the cursor, escapes resolved, handed out as they come."""
    yield from feed.expect('"')
    while True:
        found = _IN_STRING.search(feed.text, feed.at)
        if found is None:
            _hand_out(feed, len(feed.text), emit)
            yield from feed.wait()
            continue
        _hand_out(feed, found.start(), emit)
        if found.group() == '"':
            feed.at += 1
            return
        if found.group() == "\\":
            emit((yield from _escape(feed)))
        else:
            _hand_out(feed, feed.at + 1, emit)


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
