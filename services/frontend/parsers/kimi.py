"""Kimi K2: `<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
<|tool_calls_section_end|>`. The text before the arguments is the call's id, which Kimi's template wants back."""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Feed, Malformed, Steps
from services.frontend.parsers.json_call import stream_arguments
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parts import MALFORMED, TRUNCATED

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_HEAD_ENDS = Marks((ARGUMENTS, CALL_END, SECTION_END, CALL))


def _read_section(feed: Feed) -> Steps:
    yield from feed.skip_blanks()
    while (yield from feed.has(CALL)):
        yield from _read_call(feed)
        feed.settle()
        yield from feed.skip_blanks()
    if not (yield from feed.has(SECTION_END)):
        is_cut = not (yield from feed.peek())
        # The answer may well end behind a whole call.
        if is_cut and feed.calls:
            return
        raise Malformed(TRUNCATED if is_cut else MALFORMED)


def _read_call(feed: Feed) -> Steps:
    head = (yield from feed.take_until(_HEAD_ENDS, NAME_CHARACTERS_MAX)).strip()
    yield from feed.expect(ARGUMENTS)
    name = head.partition(":")[0].removeprefix("functions.")
    if not name:
        raise Malformed
    yield from feed.skip_blanks()
    if (yield from feed.peek()) != "{":
        raise Malformed(MALFORMED if (yield from feed.peek()) else TRUNCATED)
    feed.begin_call(name, head if ":" in head else "")
    yield from stream_arguments(feed)
    yield from feed.skip_blanks()
    if (yield from feed.has(CALL_END)) or (yield from feed.is_at_mark()):
        return
    if (yield from feed.peek()):
        raise Malformed


FAMILY = ToolFamily(
    name="kimi_k2",
    readers={SECTION: _read_section, CALL: _read_call},
    closing_marks=(SECTION_END, CALL_END, ARGUMENTS),
    hidden_marks=(SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS),
    template_marks=(SECTION, CALL),
    gives_call_ids=True,
)
