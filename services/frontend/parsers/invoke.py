"""Calls as `<invoke name="...">` with `<parameter name="...">value</parameter>` in a section: MiniMax M2, and DeepSeek V3.2 with
`｜DSML｜` in each tag and `string="true"` where a value is text and not JSON; the tool's schema takes precedence.

Models also write the arguments as one JSON object, or put all of them into a parameter `arguments`. They omit the section's
marks, and `</parameter>` before the next parameter.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import (
    NAME_CHARACTERS_MAX,
    BoolSteps,
    Feed,
    Interrupted,
    Malformed,
    Reader,
    Steps,
    TextSteps,
    ValueEnds,
)
from services.frontend.parsers.json_call import stream_arguments
from services.frontend.parsers.json_text import is_object, quoted, stream_container
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parameters import (
    ANYTHING,
    TEXT,
    begin_parameter,
    end_parameters,
    stream_parameter,
    to_json,
    types_of,
)
from services.frontend.parsers.parts import ARGUMENTS_MALFORMED, TRUNCATED, UNKNOWN_TOOL
from services.frontend.parsers.readers import section_reader

_BARE = re.compile(r"[^\s>\"'<]")
_QUOTES = {'"': Marks(('"', "\n", ">")), "'": Marks(("'", "\n", ">"))}
WRAPPERS = ("arguments", "input")
"""Names of parameters that models put around all arguments."""
_TYPES_BY_ATTRIBUTE = {"true": TEXT, "false": ANYTHING}


class InvokeTags:
    """The tags of a family and the reader of a call. `section_marks`: the marks of its sections. `unknown`: the types of a
    parameter for which neither the model nor the schema gives one.
    """

    def __init__(self, prefix: str, *, section_marks: Sequence[str], unknown: frozenset[str] = TEXT) -> None:
        self.invoke = f"<{prefix}invoke name="
        """Begins a call; its name follows."""
        self.invoke_end = f"</{prefix}invoke>"
        self.parameter = f"<{prefix}parameter name="
        """Begins a parameter; its name follows."""
        self.parameter_end = f"</{prefix}parameter>"
        self.inner_marks = (self.invoke_end, self.parameter, self.parameter_end)
        self._unknown = unknown
        self._ends = ValueEnds(
            self.parameter_end,
            others=(self.parameter, self.invoke_end),
            doubtful=(self.invoke, *section_marks),
            deciding=(self.parameter, self.invoke, self.invoke_end),
        )

    def read_call(self, feed: Feed, *, is_bare: bool = False) -> Steps:
        """Continues after `invoke`. `is_bare`: the call is in no section, so it must name a function of the request."""
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
            yield from self._read_json(feed, function)
            return
        feed.begin_call(function)
        while True:
            yield from feed.skip_blanks()
            if (yield from feed.has(self.invoke_end)):
                break
            if not (yield from feed.has(self.parameter)):
                if (yield from feed.is_at_mark()):
                    break
                raise feed.unexpected(self.parameter, self.invoke_end)
            name = yield from read_attribute(feed)
            yield from feed.skip_blanks()
            is_string = (yield from read_attribute(feed)) if (yield from feed.has("string=")) else ""
            yield from end_tag(feed)
            types = types_of(feed, function, parameter=name, unknown=_TYPES_BY_ATTRIBUTE.get(is_string, self._unknown))
            if feed.has_arguments or not _is_wrapper(feed, function, name):
                yield from stream_parameter(feed, name, self._ends, types=types)
            elif (yield from self._read_wrapper(feed, function, name=name)):
                return
        end_parameters(feed)

    def _read_json(self, feed: Feed, function: str) -> Steps:
        """Reads a call whose arguments are one JSON object instead of parameters."""
        if _is_wrapper(feed, function, *WRAPPERS):
            pieces: list[str] = []
            # A mark of the family ends incomplete arguments. The check of the document warns of them.
            with suppress(Interrupted):
                yield from stream_container(feed, feed.hold(pieces))
            document = "".join(pieces)
            feed.begin_call(function)
            feed.add_arguments(_unwrapped(feed, function, document=document) or document)
            if not is_object(document):
                feed.warn(ARGUMENTS_MALFORMED)
        else:
            feed.begin_call(function)
            yield from stream_arguments(feed)
        yield from feed.skip_blanks()
        if not (yield from feed.has(self.invoke_end)) and not (yield from feed.is_at_mark()):
            raise feed.unexpected(self.invoke_end)

    def _read_wrapper(self, feed: Feed, function: str, name: str) -> BoolSteps:
        """Reads a first parameter that may contain all arguments. Returns whether it was the only one, and the call is over."""
        held: list[str] = []
        mark = yield from feed.stream_until(self._ends.marks, held.append, ends=self._ends)
        text = "".join(held)
        if not mark:
            begin_parameter(feed, name)
            feed.add_arguments(text)
            raise Malformed(TRUNCATED)
        yield from feed.has(self.parameter_end)
        yield from feed.skip_blanks()
        # If other parameters follow, it is an ordinary one.
        is_only = yield from feed.has(self.invoke_end)
        value = to_json(text, ANYTHING)
        inner = _unwrapped(feed, function, document=f"{{{quoted(name)}: {value}}}") if is_only else ""
        if inner:
            feed.add_arguments(inner)
            return True
        begin_parameter(feed, name)
        feed.add_arguments(value)
        if is_only:
            end_parameters(feed)
        return is_only


def _is_wrapper(feed: Feed, function: str, *names: str) -> bool:
    """Returns whether these are names of wrappers and not of the function's own parameters."""
    properties = feed.tools.get(function, {}).get("properties") or {}
    return bool(properties) and all(name in WRAPPERS and name not in properties for name in names)


def _unwrapped(feed: Feed, function: str, document: str) -> str:
    """Returns the content of a wrapper if all of it is parameters of the function; else nothing."""
    arguments = json.loads(document) if is_object(document) else {}
    if len(arguments) != 1:
        return ""
    (name, value), *_ = arguments.items()
    if isinstance(value, str) and is_object(value):
        value = json.loads(value)
    if not isinstance(value, dict) or not _is_wrapper(feed, function, name):
        return ""
    return json.dumps(value, ensure_ascii=False) if value.keys() <= feed.tools[function]["properties"].keys() else ""


def read_attribute(feed: Feed) -> TextSteps:
    """Reads an attribute's value, with quotes of either kind or without."""
    quote = yield from feed.peek()
    if quote in _QUOTES:
        feed.at += 1
        value = yield from feed.take_until(_QUOTES[quote], NAME_CHARACTERS_MAX)
        yield from feed.expect(quote)
    else:
        value = yield from feed.take_while(_BARE)
    if not value.strip():
        raise feed.unexpected()
    return value.strip()


def end_tag(feed: Feed) -> Steps:
    """Reads the end of an opening tag."""
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
    """`sections`: closing marks by opening ones. `special`: special tokens in the marks; `shows_special`: they identify the
    family. `unknown`: see InvokeTags."""
    tags = InvokeTags(prefix, section_marks=(*sections, *sections.values()), unknown=unknown)

    def read_bare(feed: Feed) -> Steps:
        yield from tags.read_call(feed, is_bare=True)
        feed.settle()
        yield from feed.skip_blanks()
        for closing in sections.values():
            if (yield from feed.has(closing)):
                return
        feed.reject("")

    readers: dict[str, Reader] = {
        opening: section_reader(tags.invoke, tags.read_call, closing) for opening, closing in sections.items()
    }
    return ToolFamily(
        name=name,
        readers={**readers, tags.invoke: read_bare},
        closing_marks=(*sections.values(), *tags.inner_marks),
        mark_tokens=special,
        hidden_marks=(*sections, *sections.values(), tags.invoke_end, tags.parameter_end) if special else (),
        template_marks=(*sections, *(special if shows_special else ())),
    )


_DSML = "｜DSML｜"
MINIMAX_M2 = _family("minimax_m2", prefix="", sections={"<minimax:tool_call>": "</minimax:tool_call>"})
# V4 has another word for the section.
DEEPSEEK_V3_2 = _family(
    "deepseek_v3_2",
    prefix=_DSML,
    sections={f"<{_DSML}{word}>": f"</{_DSML}{word}>" for word in ("function_calls", "tool_calls")},
    special=(_DSML,),
    shows_special=True,
    unknown=ANYTHING,
)
# V4.1 has a blank after the token, and a third word.
DEEPSEEK_V4_1 = _family(
    "deepseek_v4_1",
    prefix=f"{_DSML} ",
    sections={f"<{_DSML} calls>": f"</{_DSML} calls>"},
    special=(_DSML,),
    unknown=ANYTHING,
)
