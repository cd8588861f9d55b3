"""Qwen 3 Coder and Nemotron 3: `<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>`.

Seed OSS has other outer marks; MiMo has no line breaks around values. The outer marks may be missing, and models leave
`</parameter>` and `</function>` out.
"""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Feed, Malformed, Reader, Steps, TextSteps, ValueEnds
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parameters import end_parameters, stream_parameter, types_of
from services.frontend.parsers.parts import MALFORMED

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME_ENDS = Marks((">", "\n", "<"))


def _name(feed: Feed) -> TextSteps:
    name = (yield from feed.take_until(_NAME_ENDS, NAME_CHARACTERS_MAX)).strip()
    yield from feed.expect(">")
    if not name:
        raise Malformed
    return name


def _functions_reader(opening: str, closing: str, *, is_padded: bool) -> Reader:
    """Reads one or several functions, from after the first mark."""
    ends = ValueEnds(
        PARAMETER_END,
        others=(PARAMETER, FUNCTION_END),
        doubtful=(closing, opening, FUNCTION),
        deciding=(PARAMETER, FUNCTION, FUNCTION_END),
    )

    def read(feed: Feed) -> Steps:
        while True:
            yield from read_one(feed)
            feed.settle()
            yield from feed.skip_blanks()
            if not (yield from feed.has(FUNCTION)):
                return

    def read_one(feed: Feed) -> Steps:
        function = yield from _name(feed)
        feed.begin_call(function)
        while True:
            yield from feed.skip_blanks()
            if (yield from feed.has(FUNCTION_END)):
                break
            if not (yield from feed.has(PARAMETER)):
                if (yield from feed.is_at_mark()):
                    break
                raise feed.unexpected()
            parameter = yield from _name(feed)
            types = types_of(feed, function, parameter=parameter)
            yield from stream_parameter(feed, parameter, ends, types=types, is_padded=is_padded)
        end_parameters(feed)

    return read


def _family(name: str, opening: str, closing: str, *template_marks: str, is_padded: bool = True) -> ToolFamily:
    read_functions = _functions_reader(opening=opening, closing=closing, is_padded=is_padded)

    def read(feed: Feed) -> Steps:
        yield from feed.skip_blanks()
        yield from feed.expect(FUNCTION)
        yield from read_functions(feed)
        if not (yield from feed.has(closing)) and not (yield from feed.is_at_mark()):
            raise Malformed(MALFORMED if (yield from feed.peek()) else "")

    def read_bare(feed: Feed) -> Steps:
        yield from read_functions(feed)
        if not (yield from feed.has(closing)):
            feed.reject("")

    return ToolFamily(
        name=name,
        readers={opening: read, FUNCTION: read_bare},
        closing_marks=(closing, FUNCTION_END, PARAMETER, PARAMETER_END),
        template_marks=template_marks,
    )


FAMILY = _family("qwen3_coder", "<tool_call>", "</tool_call>", FUNCTION)
SEED_OSS = _family("seed_oss", "<seed:tool_call>", "</seed:tool_call>", "<seed:tool_call>")
MIMO = _family(
    "mimo", "<tool_call>", "</tool_call>", "<parameter=example_parameter_1>value_1</parameter>", is_padded=False
)
