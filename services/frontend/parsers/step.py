"""Step 3: `<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>name\\n<steptml:invoke name="...">...</steptml:invoke>
<｜tool_call_end｜><｜tool_calls_end｜>`. The invoke says the name; what stands before it is left out."""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Feed, Steps
from services.frontend.parsers.invoke import Tags
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.readers import unexpected

SECTION, SECTION_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"
_TAGS = Tags(prefix="steptml:", section_marks=(SECTION, SECTION_END, CALL, CALL_END))
_HEAD_ENDS = Marks((_TAGS.invoke, CALL_END, SECTION_END, CALL))
_read_invoke = _TAGS.call_reader()


def _read_section(feed: Feed) -> Steps:
    begun = feed.calls
    while True:
        yield from feed.skip_blanks()
        if (yield from feed.has(SEPARATOR)):
            continue
        if not (yield from feed.has(CALL)):
            break
        yield from _read_call(feed)
        feed.settle()
    if (yield from feed.has(SECTION_END)):
        return
    if feed.calls > begun and ((yield from feed.is_at_mark()) or not (yield from feed.peek())):
        return
    raise unexpected(feed, CALL, SECTION_END)


def _read_call(feed: Feed) -> Steps:
    yield from feed.take_until(_HEAD_ENDS, NAME_CHARACTERS_MAX)
    yield from feed.expect(_TAGS.invoke)
    yield from _read_invoke(feed)
    feed.settle()
    yield from feed.skip_blanks()
    if (yield from feed.has(CALL_END)) or (yield from feed.is_at_mark()):
        return
    if (yield from feed.peek()):
        raise unexpected(feed, CALL_END)


FAMILY = ToolFamily(
    name="step3",
    readers={SECTION: _read_section, CALL: _read_call},
    closing_marks=(
        SECTION_END,
        CALL_END,
        SEPARATOR,
        _TAGS.invoke,
        _TAGS.invoke_end,
        _TAGS.parameter,
        _TAGS.parameter_end,
    ),
    hidden_marks=(SECTION, SECTION_END, CALL, CALL_END, SEPARATOR),
    template_marks=(SECTION, CALL),
)
