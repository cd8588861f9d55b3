"""Kimi K3: `<|open|>tools<|sep|><|open|>call tool="name" index="1"<|sep|><|open|>argument key="key" type="string"<|sep|>value
<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>`.

Text stands as it is; values of other types are JSON. Attributes escape `&` and `"`. The answer's own element, `response`, is left
out, and so is the reasoning's, `think`, where its family reads it.
"""

import re
from collections.abc import Generator, Mapping

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Doubts, Feed, Malformed, Steps
from services.frontend.parsers.json_text import quoted
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parts import MALFORMED, TRUNCATED
from services.frontend.parsers.readers import read_section
from services.frontend.parsers.typed_values import ANYTHING, TEXT, stream_typed, types_of

TOKENS = OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
SECTION, SECTION_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
CALL, CALL_END = "<|open|>call", "<|close|>call<|sep|>"
ARGUMENT, ARGUMENT_END = "<|open|>argument", "<|close|>argument<|sep|>"
ANSWER_MARKS = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
_HEAD_CHARACTERS_MAX = 2 * NAME_CHARACTERS_MAX
_HEAD_ENDS = Marks(TOKENS)
_DOUBTFUL = (CALL_END, SECTION, SECTION_END, CALL, ARGUMENT)
_VALUE_ENDS = Marks((ARGUMENT_END, *_DOUBTFUL))
_DOUBTS = Doubts(_DOUBTFUL, end=ARGUMENT_END, others=(ARGUMENT, CALL))
Attributes = Generator[None, None, Mapping[str, str]]
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _read_section(feed: Feed) -> Steps:
    yield from read_section(feed, CALL, _read_call, SECTION_END)


def _read_call(feed: Feed) -> Steps:
    attributes = yield from _attributes(feed)
    function = attributes.get("tool", "")
    if not function:
        raise Malformed
    feed.begin_call(function)
    comma = "{"
    while True:
        yield from feed.skip_blanks()
        if not (yield from feed.has(ARGUMENT)):
            break
        attributes = yield from _attributes(feed)
        key = attributes.get("key", "")
        feed.add_arguments(f"{comma}{quoted(key)}: ")
        comma = ", "
        said = TEXT if attributes.get("type", "string") == "string" else ANYTHING
        types = said if said == TEXT else types_of(feed, function, key, unknown=said)
        yield from stream_typed(feed, _VALUE_ENDS, types, _DOUBTS)
        yield from feed.has(ARGUMENT_END)
        feed.settle()
    if not (yield from feed.has(CALL_END)) and not (yield from feed.is_at_mark()):
        raise Malformed(MALFORMED if (yield from feed.peek()) else TRUNCATED)
    feed.add_arguments("{}" if comma == "{" else "}")


def _attributes(feed: Feed) -> Attributes:
    """What stands in an element's opening mark, from behind its name to behind the mark."""
    head = yield from feed.take_until(_HEAD_ENDS, _HEAD_CHARACTERS_MAX)
    yield from feed.expect(SEPARATOR)
    found = _ATTRIBUTE.findall(head)
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}


FAMILY = ToolFamily(
    name="kimi_k3",
    readers={SECTION: _read_section},
    closing_marks=(SECTION_END, CALL, CALL_END, ARGUMENT, ARGUMENT_END, *ANSWER_MARKS),
    mark_tokens=TOKENS,
    hidden_marks=(SECTION, SECTION_END, CALL, CALL_END, ARGUMENT, ARGUMENT_END, *ANSWER_MARKS),
    template_marks=(SECTION, "<|open|>call tool=", OPEN),
)
