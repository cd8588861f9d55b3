"""Hermes, Qwen 2.5, Qwen 3 and ERNIE 4.5: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`; LongCat with
`<longcat_tool_call>`."""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import Feed, Reader, Steps
from services.frontend.parsers.json_call import read_json_call
from services.frontend.parsers.readers import close_call


def _reader(opening: str, closing: str) -> Reader:
    def read(feed: Feed) -> Steps:
        yield from read_json_call(feed)
        yield from close_call(feed, closing, opening)

    return read


def _family(name: str, opening: str, closing: str) -> ToolFamily:
    return ToolFamily(
        name=name,
        readers={opening: _reader(opening, closing)},
        closing_marks=(closing,),
        template_marks=(opening,),
    )


FAMILY = _family("hermes", "<tool_call>", "</tool_call>")
LONGCAT = _family("longcat", "<longcat_tool_call>", "</longcat_tool_call>")
