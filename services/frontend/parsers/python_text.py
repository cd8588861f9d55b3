"""Python literals that come in pieces, as JSON text."""

import re

from services.frontend.parsers.feed import (
    BLANKS_MAX,
    NAME_CHARACTERS_MAX,
    Asked,
    Emit,
    Feed,
    Found,
    Malformed,
    Steps,
)
from services.frontend.parsers.json_text import inner, string_goes_on
from services.frontend.parsers.parts import MALFORMED, TRUNCATED

_NUMBER = re.compile(r"[-+.0-9eE_]")
_WORD = re.compile(r"\w")
_HEXADECIMAL = re.compile(r"[0-9A-Fa-f]+\Z")
_WORDS = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEXADECIMAL_DIGITS = {"x": 2, "u": 4, "U": 8}
_BEHIND_STRING = ("", ",", ":", ")", "]", "}")
_BLANKS = re.compile(r"\s*")
_KEYWORD = re.compile(r"\w+\s*")
DEPTH_MAX = 64
"""Deepest nesting of lists and dictionaries; deeper ones are malformed."""


def malformed(feed: Feed) -> Malformed:
    """What is wrong at the cursor: something else is there, or nothing more comes."""
    return Malformed(TRUNCATED if feed.is_over and feed.at >= len(feed.text) else MALFORMED)


def stream_literal(feed: Feed, emit: Emit, depth: int = 0) -> Steps:
    """A literal at the cursor: handed out as JSON while it comes."""
    character = yield from feed.peek()
    if character in ("'", '"'):
        emit('"')
        yield from _stream_string(feed, emit)
        emit('"')
    elif character in ("[", "("):
        yield from _stream_list(feed, emit, character, depth)
    elif character == "{":
        yield from _stream_dictionary(feed, emit, depth)
    elif character and character in "-+.0123456789":
        emit((yield from _number(feed)))
    else:
        word = yield from feed.take_while(_WORD)
        if word not in _WORDS:
            raise malformed(feed)
        emit(_WORDS[word])


def _number(feed: Feed) -> Found:
    text = (yield from feed.take_while(_NUMBER)).replace("_", "")
    try:
        return str(int(text))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        raise malformed(feed) from None
    # JSON has no infinity.
    return repr(number) if abs(number) < float("inf") else "null"


def _stream_string(feed: Feed, emit: Emit) -> Steps:
    quote = feed.text[feed.at]
    feed.at += 1
    pattern, _ = feed.stops.combined_with(rf"[{quote}\\]")
    text_until = 0
    while True:
        held = len(feed.text) if feed.is_over else feed.stops.held(feed.text, feed.at)
        found = pattern.search(feed.text, feed.at, held)
        end = found.start() if found else held
        text, feed.at = feed.text[feed.at : end], end
        if text:
            emit(inner(text))
        if found is None:
            if feed.is_over:
                raise Malformed(TRUNCATED)
            yield
            text_until = 0
        elif found.group() == quote:
            ends = yield from _ends_string(feed)
            feed.at += 1
            if ends:
                return
            emit(inner(quote))
        elif len(found.group()) > 1:
            if feed.at >= text_until:
                text_until = feed.at + (yield from string_goes_on(feed, len(found.group()), quote, _BEHIND_STRING))
            emit(inner(found.group()))
            feed.at += len(found.group())
        else:
            text = yield from _escape(feed)
            if text:
                emit(inner(text))


def _ends_string(feed: Feed) -> Asked:
    """Whether the quote at the cursor ends its string. Models nest quotes of one kind, as in shell commands: what stands behind
    the quote decides."""
    while True:
        behind = _BLANKS.match(feed.text, feed.at + 1)
        assert behind is not None, "the pattern matches nothing too"
        at = behind.end()
        keyword = _KEYWORD.match(feed.text, at)
        end = keyword.end() if keyword is not None else at
        if at - feed.at > BLANKS_MAX or end - at > NAME_CHARACTERS_MAX:
            return True
        # A comma may be missing before a keyword; then the call is malformed, and the string is none the less over.
        if (end < len(feed.text) and feed.stops.held(feed.text, at) != at) or feed.is_over:
            is_keyword = keyword is not None and feed.text[end : end + 1] == "="
            return is_keyword or feed.text[at : at + 1] in _BEHIND_STRING or feed.stops.is_at(feed.text, at)
        yield


def _escape(feed: Feed) -> Found:
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
    # Python leaves a backslash before any other character as it is; before quotes and itself it goes.
    return _ESCAPES.get(letter, letter if letter in "'\"\\" else "\\" + letter)


def _stream_list(feed: Feed, emit: Emit, opening: str, depth: int) -> Steps:
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
            yield from _expect(feed, ",")
            yield from feed.skip_blanks()
            if (yield from feed.has(closing)):
                break
            emit(", ")
        is_first = False
        yield from stream_literal(feed, emit, depth + 1)
    emit("]")


def _stream_dictionary(feed: Feed, emit: Emit, depth: int) -> Steps:
    """A dictionary, or a set, which becomes a list: JSON has none."""
    if depth >= DEPTH_MAX:
        raise Malformed
    feed.at += 1
    yield from feed.skip_blanks()
    if (yield from feed.has("}")):
        emit("{}")
        return
    held: list[str] = []
    yield from stream_literal(feed, feed.hold(held), depth + 1)
    yield from feed.skip_blanks()
    first = "".join(held)
    is_set = (yield from feed.peek()) != ":"
    if not is_set and not first.startswith('"'):
        raise malformed(feed)
    emit(("[" if is_set else "{") + first)
    while True:
        if not is_set:
            yield from _expect(feed, ":")
            emit(": ")
            yield from feed.skip_blanks()
            yield from stream_literal(feed, emit, depth + 1)
            yield from feed.skip_blanks()
        # A comma may stand before the end.
        if (yield from feed.peek()) != "}":
            yield from _expect(feed, ",")
            yield from feed.skip_blanks()
        if (yield from feed.has("}")):
            emit("]" if is_set else "}")
            return
        emit(", ")
        if not is_set and (yield from feed.peek()) not in ("'", '"'):
            raise malformed(feed)
        yield from stream_literal(feed, emit, depth + 1)
        yield from feed.skip_blanks()


def _expect(feed: Feed, literal: str) -> Steps:
    if not (yield from feed.has(literal)):
        raise malformed(feed)
