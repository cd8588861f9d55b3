"""Converts Python literals that come in pieces to JSON text."""

import re

from services.frontend.parsers.feed import (
    BLANKS_MAX,
    NAME_CHARACTERS_MAX,
    BoolSteps,
    Emit,
    Feed,
    Malformed,
    Steps,
    TextSteps,
)
from services.frontend.parsers.json_text import inner, stream_quoted

_NUMBER = re.compile(r"[-+.0-9eE_]")
_WORD = re.compile(r"\w")
_HEXADECIMAL = re.compile(r"[0-9A-Fa-f]+\Z")
_WORDS = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEXADECIMAL_DIGITS = {"x": 2, "u": 4, "U": 8}
_AFTER_STRING = ("", ",", ":", ")", "]", "}")
_BLANKS = re.compile(r"\s*")
_KEYWORD = re.compile(r"\w+\s*")
DEPTH_MAX = 64
"""Deepest nesting of lists and dictionaries; deeper ones are malformed."""


def stream_literal(feed: Feed, emit: Emit, depth: int = 0) -> Steps:
    """Emits a literal at the cursor as JSON while it comes."""
    character = yield from feed.peek()
    if character in ("'", '"'):
        feed.at += 1
        emit('"')
        yield from stream_quoted(
            feed,
            lambda text: emit(inner(text)),
            character,
            read_escape=_read_escape,
            is_end=_is_string_end,
            after=_AFTER_STRING,
        )
        emit('"')
    elif character in ("[", "("):
        yield from _stream_list(feed, emit, character, depth=depth)
    elif character == "{":
        yield from _stream_dictionary(feed, emit, depth)
    elif character and character in "-+.0123456789":
        emit((yield from _number(feed)))
    else:
        word = yield from feed.take_while(_WORD)
        if word not in _WORDS:
            raise feed.unexpected()
        emit(_WORDS[word])


def _number(feed: Feed) -> TextSteps:
    text = (yield from feed.take_while(_NUMBER)).replace("_", "")
    try:
        return str(int(text))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        raise feed.unexpected() from None
    # JSON has no infinity.
    return repr(number) if abs(number) < float("inf") else "null"


def _is_string_end(feed: Feed) -> BoolSteps:
    """Returns whether the quote at the cursor ends its string. Models nest quotes of one kind, as in shell commands, so the text
    after the quote decides."""
    while True:
        after = _BLANKS.match(feed.text, feed.at + 1)
        assert after is not None, "the pattern matches the empty string"
        at = after.end()
        keyword = _KEYWORD.match(feed.text, at)
        end = keyword.end() if keyword is not None else at
        if at - feed.at > BLANKS_MAX or end - at > NAME_CHARACTERS_MAX:
            return True
        # A keyword after the quote: the comma is missing. The string has ended, and the call is malformed.
        if (end < len(feed.text) and feed.stops.held(feed.text, at) != at) or feed.is_over:
            is_keyword = keyword is not None and feed.text[end : end + 1] == "="
            return is_keyword or feed.text[at : at + 1] in _AFTER_STRING or feed.stops.is_at(feed.text, at)
        yield


def _read_escape(feed: Feed) -> TextSteps:
    yield from feed.wait(2)
    letter = feed.text[feed.at + 1]
    if (count := _HEXADECIMAL_DIGITS.get(letter)) is not None:
        yield from feed.wait(2 + count)
        digits = feed.text[feed.at + 2 : feed.at + 2 + count]
        if not _HEXADECIMAL.match(digits) or int(digits, 16) > 0x10FFFF or 0xD800 <= int(digits, 16) < 0xE000:
            raise Malformed
        feed.at += 2 + count
        return chr(int(digits, 16))
    feed.at += 2
    # Python keeps a backslash before any other character, and drops it before quotes and backslashes.
    return _ESCAPES.get(letter, letter if letter in "'\"\\" else "\\" + letter)


def _stream_list(feed: Feed, emit: Emit, opening: str, *, depth: int) -> Steps:
    if depth >= DEPTH_MAX:
        raise Malformed
    closing = "]" if opening == "[" else ")"
    feed.at += 1
    emit("[")
    is_first = True
    while True:
        yield from feed.skip_blanks()
        if (yield from feed.has(closing)):
            break
        if not is_first:
            yield from feed.expect(",")
            yield from feed.skip_blanks()
            if (yield from feed.has(closing)):
                break
            emit(", ")
        is_first = False
        yield from stream_literal(feed, emit, depth + 1)
    emit("]")


def _stream_dictionary(feed: Feed, emit: Emit, depth: int) -> Steps:
    """Emits a dictionary; a set as a list, since JSON has no sets."""
    if depth >= DEPTH_MAX:
        raise Malformed
    feed.at += 1
    yield from feed.skip_blanks()
    if (yield from feed.has("}")):
        emit("{}")
        return
    # Held until the next character shows whether it is a key or an element of a set.
    held: list[str] = []
    yield from stream_literal(feed, feed.hold(held), depth + 1)
    yield from feed.skip_blanks()
    first = "".join(held)
    is_set = (yield from feed.peek()) != ":"
    if not is_set and not first.startswith('"'):
        raise feed.unexpected()
    emit(("[" if is_set else "{") + first)
    while True:
        if not is_set:
            yield from feed.expect(":")
            emit(": ")
            yield from feed.skip_blanks()
            yield from stream_literal(feed, emit, depth + 1)
            yield from feed.skip_blanks()
        # A comma before the end is allowed.
        if (yield from feed.peek()) != "}":
            yield from feed.expect(",")
            yield from feed.skip_blanks()
        if (yield from feed.has("}")):
            emit("]" if is_set else "}")
            return
        emit(", ")
        if not is_set and (yield from feed.peek()) not in ("'", '"'):
            raise feed.unexpected()
        yield from stream_literal(feed, emit, depth + 1)
        yield from feed.skip_blanks()
