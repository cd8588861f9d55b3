"""Qwen 3 Coder: `<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>`.

The outer marks may be missing, and models leave `</parameter>` and `</function>` out.
"""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Doubts, Feed, Found, Malformed, Steps
from services.frontend.parsers.json_text import quoted
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parts import MALFORMED, TRUNCATED
from services.frontend.parsers.typed_values import stream_typed, types_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_DOUBTFUL = (CLOSE, OPEN, FUNCTION)
_ENDS = Marks((PARAMETER_END, PARAMETER, FUNCTION_END, *_DOUBTFUL))
_DOUBTS = Doubts(_DOUBTFUL, end=PARAMETER_END, others=(PARAMETER, FUNCTION, FUNCTION_END))
_NAME_ENDS = Marks((">", "\n", "<"))


def _read(feed: Feed) -> Steps:
    yield from feed.skip_blanks()
    yield from feed.expect(FUNCTION)
    yield from _read_functions(feed)
    if not (yield from feed.has(CLOSE)) and not (yield from feed.is_at_mark()):
        raise Malformed(MALFORMED if (yield from feed.peek()) else "")


def _read_function(feed: Feed) -> Steps:
    yield from _read_functions(feed)
    if not (yield from feed.has(CLOSE)):
        feed.reject("")


def _read_functions(feed: Feed) -> Steps:
    """One or several, from behind the first mark."""
    while True:
        yield from _read_one(feed)
        feed.settle()
        yield from feed.skip_blanks()
        if not (yield from feed.has(FUNCTION)):
            return


def _name(feed: Feed) -> Found:
    name = (yield from feed.take_until(_NAME_ENDS, NAME_CHARACTERS_MAX)).strip()
    yield from feed.expect(">")
    if not name:
        raise Malformed
    return name


def _read_one(feed: Feed) -> Steps:
    function = yield from _name(feed)
    feed.begin_call(function)
    separator = "{"
    while True:
        yield from feed.skip_blanks()
        if (yield from feed.has(FUNCTION_END)):
            break
        if not (yield from feed.has(PARAMETER)):
            if (yield from feed.is_at_mark()):
                break
            raise Malformed(MALFORMED if (yield from feed.peek()) else TRUNCATED)
        parameter = yield from _name(feed)
        feed.add_arguments(f"{separator}{quoted(parameter)}: ")
        separator = ", "
        yield from stream_typed(feed, _ENDS, types_of(feed, function, parameter), _DOUBTS, is_padded=True)
        yield from feed.has(PARAMETER_END)
        feed.settle()
    feed.add_arguments("{}" if separator == "{" else "}")


FAMILY = ToolFamily(
    name="qwen3_coder",
    readers={OPEN: _read, FUNCTION: _read_function},
    closing_marks=(CLOSE, FUNCTION_END, PARAMETER, PARAMETER_END),
    template_marks=(FUNCTION,),
)
