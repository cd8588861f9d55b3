"""DeepSeek V3, R1 and V3.1.

V3 and R1: `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
<｜tool▁calls▁end｜>`; V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`. The text after the separator tells
them apart.
"""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Feed, Malformed, Steps
from services.frontend.parsers.json_call import stream_arguments
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.readers import close_call, section_reader

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```"
_HEAD_ENDS = Marks((SEPARATOR, CALL_END, SECTION_END, CALL))
_NAME_ENDS = Marks((_FENCE, "\n", "{", CALL_END, SECTION_END, CALL))


def _read_call(feed: Feed) -> Steps:
    name = (yield from feed.take_until(_HEAD_ENDS, NAME_CHARACTERS_MAX)).strip()
    yield from feed.expect(SEPARATOR)
    yield from feed.skip_blanks()
    if (yield from feed.peek()) != "{":
        # The text before the separator was the call's type.
        name = (yield from feed.take_until(_NAME_ENDS, NAME_CHARACTERS_MAX)).strip()
        yield from feed.skip_blanks()
        if (yield from feed.has(_FENCE)):
            yield from feed.has("json")
            yield from feed.skip_blanks()
    if not name:
        raise Malformed
    if (yield from feed.peek()) != "{":
        raise feed.unexpected("{", _FENCE)
    feed.begin_call(name)
    yield from stream_arguments(feed)
    yield from feed.skip_blanks()
    yield from feed.has(_FENCE)
    yield from close_call(feed, CALL_END)


FAMILY = ToolFamily(
    name="deepseek_v3",
    readers={SECTION: section_reader(CALL, _read_call, SECTION_END), CALL: _read_call},
    closing_marks=(SECTION_END, CALL_END, SEPARATOR),
    hidden_marks=(SECTION, SECTION_END, CALL, CALL_END, SEPARATOR),
    interrupting_marks=(f"\n{_FENCE}{CALL_END}", f"{_FENCE}{CALL_END}"),
    template_marks=(SECTION, CALL),
)
