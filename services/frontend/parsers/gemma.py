"""Gemma: `<|tool_call>call:name{city:<|"|>Paris<|"|>,days:3}<tool_call|>` (Gemma 4) and
`<start_function_call>call:name{city:<escape>Paris<escape>,days:3}<end_function_call>` (FunctionGemma).

Keys have no quotes. Text is written between quotes that are tokens, without escapes. Mappings and lists nest.
"""

import re
from dataclasses import dataclass

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import (
    NAME_CHARACTERS_MAX,
    Feed,
    Interrupted,
    Malformed,
    Reader,
    Steps,
    TextSteps,
    ValueEnds,
)
from services.frontend.parsers.json_text import inner, quoted
from services.frontend.parsers.parameters import ANYTHING, to_json, types_of
from services.frontend.parsers.parts import ARGUMENTS_MALFORMED, TRUNCATED, Part
from services.frontend.parsers.python_text import DEPTH_MAX
from services.frontend.parsers.readers import close_call

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FUNCTION_OPEN, FUNCTION_CLOSE, FUNCTION_QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
_NAME = re.compile(r"[\w.\-]")
_KEY = re.compile(r"[^:,{}\[\]<\n]")
_BARE = re.compile(r"[^,{}\[\]<]")
_BARE_CHARACTERS_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _GemmaCall:
    """The call that is read. `text_ends`: its closing mark is the quote; the marks of calls end a text without one."""

    function: str
    text_ends: ValueEnds

    @property
    def quote(self) -> str:
        return self.text_ends.closing


def _reader(opening: str, closing: str, quote: str) -> Reader:
    text_ends = ValueEnds(quote, others=(opening,), doubtful=(closing,), deciding=(opening,))

    def read(feed: Feed) -> Steps:
        yield from feed.skip_blanks()
        # Some models omit the word.
        if not (yield from feed.has("call:")):
            yield from feed.expect(":")
        name = yield from feed.take_while(_NAME)
        if not name:
            raise feed.unexpected("{")
        yield from feed.expect("{")
        feed.begin_call(name)
        try:
            yield from _stream_mapping(feed, _GemmaCall(function=name, text_ends=text_ends), 0)
        except Interrupted:
            feed.warn(ARGUMENTS_MALFORMED)
        yield from close_call(feed, closing)

    return read


def _stream_mapping(feed: Feed, call: _GemmaCall, depth: int) -> Steps:
    """Delivers a mapping, from after its opening brace to after its closing one."""
    separator = "{"
    while True:
        yield from feed.skip_blanks()
        if (yield from feed.has("}")):
            feed.add_arguments("{}" if separator == "{" else "}")
            return
        if separator != "{":
            yield from feed.expect(",")
            yield from feed.skip_blanks()
        key = yield from _key(feed, call)
        feed.add_arguments(f"{separator}{quoted(key)}: ")
        separator = ", "
        types = types_of(feed, call.function, parameter=key, unknown=ANYTHING) if depth == 0 else ANYTHING
        yield from _stream_value(feed, call, types, depth=depth)


def _key(feed: Feed, call: _GemmaCall) -> TextSteps:
    if (yield from feed.has(call.quote)):
        key = yield from feed.take_until(call.text_ends.marks, NAME_CHARACTERS_MAX)
        yield from feed.expect(call.quote)
    else:
        key = yield from feed.take_while(_KEY)
    if not key.strip():
        raise feed.unexpected()
    yield from feed.skip_blanks()
    yield from feed.expect(":")
    yield from feed.skip_blanks()
    return key.strip()


def _stream_value(feed: Feed, call: _GemmaCall, types: frozenset[str], *, depth: int) -> Steps:
    if depth >= DEPTH_MAX:
        raise Malformed
    if (yield from feed.has(call.quote)):
        yield from _stream_text(feed, call, types)
    elif (yield from feed.has("{")):
        yield from _stream_mapping(feed, call, depth + 1)
    elif (yield from feed.has("[")):
        yield from _stream_list(feed, call, depth + 1)
    else:
        text = yield from feed.take_while(_BARE, _BARE_CHARACTERS_MAX)
        if not text.strip():
            raise feed.unexpected()
        feed.add_arguments(to_json(text.strip(), types))


def _stream_list(feed: Feed, call: _GemmaCall, depth: int) -> Steps:
    separator = "["
    while True:
        yield from feed.skip_blanks()
        if (yield from feed.has("]")):
            feed.add_arguments("[]" if separator == "[" else "]")
            return
        if separator != "[":
            yield from feed.expect(",")
            yield from feed.skip_blanks()
        feed.add_arguments(separator)
        separator = ", "
        yield from _stream_value(feed, call, ANYTHING, depth=depth)


def _stream_text(feed: Feed, call: _GemmaCall, types: frozenset[str]) -> Steps:
    """Delivers a text from after its opening quote. Models quote numbers too; the schema's type takes precedence."""
    ends = call.text_ends
    is_text = not types or "string" in types
    if is_text:
        feed.add_arguments('"')

        def to_part(piece: str) -> Part:
            return feed.to_arguments(inner(piece))

        def emit(piece: str) -> None:
            feed.add_arguments(inner(piece))

        mark = yield from feed.stream_until(ends.marks, emit, lambda: to_part, ends=ends)
    else:
        held: list[str] = []
        mark = yield from feed.stream_until(ends.marks, held.append, ends=ends)
        feed.add_arguments(to_json("".join(held), types) if mark else "".join(held))
    if not mark:
        raise Malformed(TRUNCATED)
    if mark != call.quote:
        raise Interrupted
    yield from feed.expect(call.quote)
    if is_text:
        feed.add_arguments('"')


FAMILY = ToolFamily(
    name="gemma",
    readers={
        OPEN: _reader(opening=OPEN, closing=CLOSE, quote=QUOTE),
        FUNCTION_OPEN: _reader(opening=FUNCTION_OPEN, closing=FUNCTION_CLOSE, quote=FUNCTION_QUOTE),
    },
    closing_marks=(CLOSE, QUOTE, FUNCTION_CLOSE, FUNCTION_QUOTE),
    hidden_marks=(OPEN, CLOSE, QUOTE, FUNCTION_OPEN, FUNCTION_CLOSE, FUNCTION_QUOTE),
    template_marks=(OPEN, FUNCTION_OPEN),
)
