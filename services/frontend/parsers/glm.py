"""GLM 4.5 to 4.7: `<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>`; from 4.7 on without
the line ends."""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Doubts, Feed, Malformed, Steps
from services.frontend.parsers.json_text import quoted
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parts import MALFORMED, TRUNCATED
from services.frontend.parsers.section import unexpected
from services.frontend.parsers.typed_values import ANYTHING, stream_typed, types_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME_ENDS = Marks((KEY, CLOSE, "\n", "<tool_call>", "{"))
_KEY_ENDS = Marks((KEY_END, "\n", CLOSE))
_DOUBTFUL = (CLOSE, OPEN, KEY)
_VALUE_ENDS = Marks((VALUE_END, *_DOUBTFUL))
_DOUBTS = Doubts(_DOUBTFUL, end=VALUE_END, others=(KEY, VALUE))


def _read(feed: Feed) -> Steps:
    yield from feed.skip_blanks()
    function = (yield from feed.take_until(_NAME_ENDS, NAME_CHARACTERS_MAX)).strip()
    yield from feed.skip_blanks()
    has_keys = yield from feed.has(KEY)
    if not function or not (has_keys or (yield from feed.has(CLOSE))):
        raise Malformed(MALFORMED if (yield from feed.peek()) else TRUNCATED)
    feed.begin_call(function)
    if has_keys:
        yield from _read_arguments(feed, function)
    else:
        feed.add_arguments("{}")


def _read_arguments(feed: Feed, function: str) -> Steps:
    """From behind the first key's mark to behind the closing mark."""
    separator = "{"
    while True:
        key = (yield from feed.take_until(_KEY_ENDS, NAME_CHARACTERS_MAX)).strip()
        yield from feed.expect(KEY_END)
        yield from feed.skip_blanks()
        yield from feed.expect(VALUE)
        feed.add_arguments(f"{separator}{quoted(key)}: ")
        separator = ", "
        yield from stream_typed(feed, _VALUE_ENDS, types_of(feed, function, key, unknown=ANYTHING), _DOUBTS)
        yield from feed.has(VALUE_END)
        feed.settle()
        yield from feed.skip_blanks()
        if (yield from feed.has(KEY)):
            continue
        if not (yield from feed.has(CLOSE)) and not (yield from feed.is_at_mark()):
            raise unexpected(feed, KEY, CLOSE)
        feed.add_arguments("}")
        return


FAMILY = ToolFamily(
    name="glm45",
    readers={OPEN: _read},
    closing_marks=(CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    template_marks=(KEY,),
)
