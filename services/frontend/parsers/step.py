"""Step 3: `<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>name\\n<steptml:invoke name="...">...</steptml:invoke>
<｜tool_call_end｜><｜tool_calls_end｜>`. The invoke contains the name; the text before it is dropped."""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Feed, Steps
from services.frontend.parsers.invoke import InvokeTags
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.readers import close_call, section_reader

SECTION, SECTION_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"
_TAGS = InvokeTags("steptml:", section_marks=(SECTION, SECTION_END, CALL, CALL_END))
_HEAD_ENDS = Marks((_TAGS.invoke, CALL_END, SECTION_END, CALL))


def _read_call(feed: Feed) -> Steps:
    yield from feed.take_until(_HEAD_ENDS, NAME_CHARACTERS_MAX)
    yield from feed.expect(_TAGS.invoke)
    yield from _TAGS.read_call(feed)
    feed.settle()
    yield from close_call(feed, CALL_END)


FAMILY = ToolFamily(
    name="step3",
    readers={SECTION: section_reader(CALL, _read_call, SECTION_END, separator=SEPARATOR), CALL: _read_call},
    closing_marks=(SECTION_END, CALL_END, SEPARATOR, _TAGS.invoke, *_TAGS.inner_marks),
    hidden_marks=(SECTION, SECTION_END, CALL, CALL_END, SEPARATOR),
    template_marks=(SECTION, CALL),
)
