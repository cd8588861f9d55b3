"""Calls as `<invoke name="...">` with `<parameter name="...">value</parameter>` in a section: MiniMax M2, and DeepSeek V3.2 with
`｜DSML｜` in each tag and `string="true"` where a value is text and not JSON; the tool's schema knows better.

Models write the arguments as one JSON object instead, or put all of them into a parameter `arguments`.
They leave the section's marks out, and `</parameter>` before the next one.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import (
    NAME_CHARACTERS_MAX,
    Asked,
    Doubts,
    Feed,
    Found,
    Interrupted,
    Malformed,
    Reader,
    Steps,
)
from services.frontend.parsers.json_call import stream_arguments
from services.frontend.parsers.json_text import is_object, quoted, stream_container
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parts import ARGUMENTS_MALFORMED, TRUNCATED, UNKNOWN_TOOL
from services.frontend.parsers.readers import read_section, unexpected
from services.frontend.parsers.typed_values import ANYTHING, TEXT, stream_typed, to_json, types_of

_BARE = re.compile(r"[^\s>\"'<]")
_QUOTES = {'"': Marks(('"', "\n", ">")), "'": Marks(("'", "\n", ">"))}
WRAPPERS = ("arguments", "input")
_SAID_TYPES = {"true": TEXT, "false": ANYTHING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of a family. `section_marks`: what begins and ends its sections. `unknown`: the types of a parameter of which neither the
    model nor the schema says any."""

    prefix: str = ""
    section_marks: Sequence[str]
    unknown: frozenset[str] = TEXT

    @property
    def invoke(self) -> str:
        """What begins a call; its name follows."""
        return f"<{self.prefix}invoke name="

    @property
    def invoke_end(self) -> str:
        """What ends a call."""
        return f"</{self.prefix}invoke>"

    @property
    def parameter(self) -> str:
        """What begins a parameter; its name follows."""
        return f"<{self.prefix}parameter name="

    @property
    def parameter_end(self) -> str:
        """What ends a parameter."""
        return f"</{self.prefix}parameter>"

    def call_reader(self, *, is_bare: bool = False) -> Reader:
        """Reads on behind `invoke`. `is_bare`: without a section's mark, so that it is a call only if it names a function of
        the request."""
        doubtful = (self.invoke, *self.section_marks)
        ends = Marks((self.parameter_end, self.parameter, self.invoke_end, *doubtful))
        others = (self.parameter, self.invoke, self.invoke_end)
        doubts = Doubts(doubtful, end=self.parameter_end, others=others)

        def read(feed: Feed) -> Steps:
            yield from _read_call(feed, self, ends, doubts, is_bare=is_bare)

        return read


def _read_call(feed: Feed, tags: Tags, ends: Marks, doubts: Doubts, *, is_bare: bool) -> Steps:
    function = yield from read_attribute(feed)
    if is_bare and feed.tools and function not in feed.tools:
        raise Malformed(UNKNOWN_TOOL)
    yield from feed.skip_blanks()
    if (yield from feed.has("/>")):
        feed.begin_call(function)
        feed.add_arguments("{}")
        return
    yield from feed.expect(">")
    yield from feed.skip_blanks()
    if (yield from feed.peek()) == "{":
        yield from _read_json(feed, tags, function)
        return
    feed.begin_call(function)
    separator = "{"
    while True:
        yield from feed.skip_blanks()
        if (yield from feed.has(tags.invoke_end)):
            break
        if not (yield from feed.has(tags.parameter)):
            if (yield from feed.is_at_mark()):
                break
            raise unexpected(feed, tags.parameter, tags.invoke_end)
        name = yield from read_attribute(feed)
        yield from feed.skip_blanks()
        is_string = ""
        if (yield from feed.has("string=")):
            is_string = yield from read_attribute(feed)
        yield from end_tag(feed)
        types = types_of(feed, function, name, unknown=_SAID_TYPES.get(is_string, tags.unknown))
        if separator == "{" and _is_wrapper(feed, function, name):
            if (yield from _read_wrapper(feed, tags, ends, doubts, function, name)):
                return
            separator = ", "
            continue
        feed.add_arguments(f"{separator}{quoted(name)}: ")
        separator = ", "
        yield from stream_typed(feed, ends, types, doubts)
        yield from feed.has(tags.parameter_end)
        feed.settle()
    feed.add_arguments("{}" if separator == "{" else "}")


def _read_json(feed: Feed, tags: Tags, function: str) -> Steps:
    """A call whose arguments are one JSON object instead of parameters."""
    if _is_wrapper(feed, function, *WRAPPERS):
        pieces: list[str] = []
        with suppress(Interrupted):
            yield from stream_container(feed, feed.hold(pieces))
        document = "".join(pieces)
        feed.begin_call(function)
        feed.add_arguments(_unwrapped(feed, function, document) or document)
        if not is_object(document):
            feed.warn(ARGUMENTS_MALFORMED)
    else:
        feed.begin_call(function)
        yield from stream_arguments(feed)
    yield from feed.skip_blanks()
    if not (yield from feed.has(tags.invoke_end)) and not (yield from feed.is_at_mark()):
        raise unexpected(feed, tags.invoke_end)


def _read_wrapper(feed: Feed, tags: Tags, ends: Marks, doubts: Doubts, function: str, name: str) -> Asked:
    """A first parameter that may hold all arguments. Whether it did, and the call is over."""
    held: list[str] = []
    mark = yield from feed.stream_until(ends, held.append, doubts=doubts)
    text = "".join(held)
    if not mark:
        feed.add_arguments(f"{{{quoted(name)}: {text}")
        raise Malformed(TRUNCATED)
    yield from feed.has(tags.parameter_end)
    yield from feed.skip_blanks()
    is_only = yield from feed.has(tags.invoke_end)
    inner = _unwrapped(feed, function, f"{{{quoted(name)}: {to_json(text, ANYTHING)}}}")
    if is_only and inner:
        feed.add_arguments(inner)
        return True
    feed.add_arguments(f"{{{quoted(name)}: {to_json(text, ANYTHING)}" + ("}" if is_only else ""))
    return is_only


def _is_wrapper(feed: Feed, function: str, *names: str) -> bool:
    """Whether the function has parameters and none of these, which are wrappers that models put around all arguments."""
    properties = feed.tools.get(function, {}).get("properties") or {}
    return bool(properties) and all(name in WRAPPERS and name not in properties for name in names)


def _unwrapped(feed: Feed, function: str, document: str) -> str:
    """What a wrapper holds, if all of it is parameters of the function; else nothing."""
    arguments = json.loads(document) if is_object(document) else {}
    if len(arguments) != 1:
        return ""
    (name, value), *_ = arguments.items()
    if isinstance(value, str) and is_object(value):
        value = json.loads(value)
    if not isinstance(value, dict) or not _is_wrapper(feed, function, name):
        return ""
    return json.dumps(value, ensure_ascii=False) if value.keys() <= feed.tools[function]["properties"].keys() else ""


def read_attribute(feed: Feed) -> Found:
    """A value, with quotes of either kind or without."""
    quote = yield from feed.peek()
    if quote in _QUOTES:
        feed.at += 1
        value = yield from feed.take_until(_QUOTES[quote], NAME_CHARACTERS_MAX)
        yield from feed.expect(quote)
    else:
        value = yield from feed.take_while(_BARE)
    if not value.strip():
        raise unexpected(feed, quote)
    return value.strip()


def end_tag(feed: Feed) -> Steps:
    """The end of an opening tag."""
    yield from feed.skip_blanks()
    yield from feed.expect(">")


def _family(
    name: str,
    prefix: str,
    sections: dict[str, str],
    *,
    special: tuple[str, ...] = (),
    shows_special: bool = False,
    unknown: frozenset[str] = TEXT,
) -> ToolFamily:
    """`sections`: closing marks by opening ones. `special`: special tokens in the marks;
    `shows_special`: a model that has them fits. `unknown`: see Tags."""
    tags = Tags(prefix=prefix, section_marks=(*sections, *sections.values()), unknown=unknown)
    read_call, read_first = tags.call_reader(), tags.call_reader(is_bare=True)

    def section(closing: str) -> Reader:
        def read(feed: Feed) -> Steps:
            yield from read_section(feed, tags.invoke, read_call, closing)

        return read

    def read_bare(feed: Feed) -> Steps:
        yield from read_first(feed)
        feed.settle()
        yield from feed.skip_blanks()
        for closing in sections.values():
            if (yield from feed.has(closing)):
                return
        feed.reject("")

    readers = {opening: section(closing) for opening, closing in sections.items()}
    return ToolFamily(
        name=name,
        readers={**readers, tags.invoke: read_bare},
        closing_marks=(*sections.values(), tags.invoke_end, tags.parameter, tags.parameter_end),
        mark_tokens=special,
        hidden_marks=(*sections, *sections.values(), tags.invoke_end, tags.parameter_end) if special else (),
        template_marks=(*sections, *(special if shows_special else ())),
    )


_DSML = "｜DSML｜"
MINIMAX_M2 = _family("minimax_m2", "", {"<minimax:tool_call>": "</minimax:tool_call>"})
# V4 has another word for the section.
DEEPSEEK_V3_2 = _family(
    "deepseek_v3_2",
    _DSML,
    {f"<{_DSML}{word}>": f"</{_DSML}{word}>" for word in ("function_calls", "tool_calls")},
    special=(_DSML,),
    shows_special=True,
    unknown=ANYTHING,
)
# V4.1 has a blank behind the token, and a third word.
DEEPSEEK_V4_1 = _family(
    "deepseek_v4_1",
    f"{_DSML} ",
    {f"<{_DSML} calls>": f"</{_DSML} calls>"},
    special=(_DSML,),
    unknown=ANYTHING,
)
