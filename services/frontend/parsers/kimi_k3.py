"""Kimi K3: `<|open|>tools<|sep|><|open|>call tool="name" index="1"<|sep|><|open|>argument key="key" type="string"<|sep|>value
<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>`.

Text is written as it is; values of other types are JSON. Attributes escape `&` and `"`. The marks of the answer's own element,
`response`, are dropped, and so are those of the reasoning's, `think`, by its family.
"""

import re
from collections.abc import Generator, Mapping

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Feed, Malformed, Steps, ValueEnds
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parameters import ANYTHING, TEXT, end_parameters, stream_parameter, types_of
from services.frontend.parsers.readers import section_reader

TOKENS = OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
SECTION, SECTION_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
CALL, CALL_END = "<|open|>call", "<|close|>call<|sep|>"
ARGUMENT, ARGUMENT_END = "<|open|>argument", "<|close|>argument<|sep|>"
ANSWER_MARKS = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
_INNER_MARKS = (SECTION_END, CALL, CALL_END, ARGUMENT, ARGUMENT_END, *ANSWER_MARKS)
_HEAD_CHARACTERS_MAX = 2 * NAME_CHARACTERS_MAX
_HEAD_ENDS = Marks(TOKENS)
_VALUE_ENDS = ValueEnds(
    ARGUMENT_END, doubtful=(CALL_END, SECTION, SECTION_END, CALL, ARGUMENT), deciding=(ARGUMENT, CALL)
)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _read_call(feed: Feed) -> Steps:
    function = (yield from _attributes(feed)).get("tool", "")
    if not function:
        raise Malformed
    feed.begin_call(function)
    while True:
        yield from feed.skip_blanks()
        if not (yield from feed.has(ARGUMENT)):
            break
        attributes = yield from _attributes(feed)
        key = attributes.get("key", "")
        is_text = attributes.get("type", "string") == "string"
        types = TEXT if is_text else types_of(feed, function, parameter=key, unknown=ANYTHING)
        yield from stream_parameter(feed, key, _VALUE_ENDS, types=types)
    if not (yield from feed.has(CALL_END)) and not (yield from feed.is_at_mark()):
        raise feed.unexpected()
    end_parameters(feed)


def _attributes(feed: Feed) -> Generator[None, None, Mapping[str, str]]:
    """Reads the attributes of an element's opening mark, from after its name to after the mark."""
    head = yield from feed.take_until(_HEAD_ENDS, _HEAD_CHARACTERS_MAX)
    yield from feed.expect(SEPARATOR)
    found = _ATTRIBUTE.findall(head)
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}


FAMILY = ToolFamily(
    name="kimi_k3",
    readers={SECTION: section_reader(CALL, _read_call, SECTION_END)},
    closing_marks=_INNER_MARKS,
    mark_tokens=TOKENS,
    hidden_marks=(SECTION, *_INNER_MARKS),
    template_marks=(SECTION, "<|open|>call tool=", OPEN),
)
