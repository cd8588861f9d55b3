"""Calls as a list of Python calls: `[get_weather(city="Paris"), now()]`, in Llama 4 between `<|python_start|>` and
`<|python_end|>`, in LFM2 between `<|tool_call_start|>` and `<|tool_call_end|>`, in Olmo 3 as lines between `<function_calls>` and
`</function_calls>`. Without the mark any `[` may begin a list; it does if a function of the request is called with keywords."""

import re

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import Feed, Interrupted, Malformed, Reader, Steps, TextSteps
from services.frontend.parsers.parameters import begin_parameter, end_parameters
from services.frontend.parsers.parts import ARGUMENTS_MALFORMED, MALFORMED, UNKNOWN_TOOL
from services.frontend.parsers.python_text import stream_literal

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.\-]")
_KEYWORD = re.compile(r"\w")


def _marked_reader(closing: str) -> Reader:
    def read(feed: Feed) -> Steps:
        yield from feed.skip_blanks()
        has_list = yield from feed.has("[")
        yield from feed.skip_blanks()
        try:
            if has_list and (yield from feed.has("]")):
                # Nothing is called.
                feed.settle()
            else:
                yield from _read_calls(feed, is_bare=False, is_listed=has_list)
        except Interrupted:
            feed.warn(ARGUMENTS_MALFORMED)
        yield from feed.skip_blanks()
        if not (yield from feed.has(closing)) and not (yield from feed.is_at_mark()):
            feed.reject("" if feed.is_over and feed.at == len(feed.text) else MALFORMED)

    return read


def _read_bare(feed: Feed) -> Steps:
    try:
        yield from _read_calls(feed, is_bare=True, is_listed=True)
    except Interrupted:
        feed.warn(ARGUMENTS_MALFORMED)


def _read_calls(feed: Feed, *, is_bare: bool, is_listed: bool) -> Steps:
    is_first = True
    while True:
        yield from feed.skip_blanks()
        yield from _read_call(feed, is_bare=is_bare and is_first)
        is_first = False
        yield from feed.skip_blanks()
        has_comma = yield from feed.has(",")
        yield from feed.skip_blanks()
        if is_listed and (yield from feed.has("]")):
            return
        if is_listed and not has_comma:
            raise feed.unexpected()
        # Without a list, each call is on its own line, up to the closing mark.
        following = yield from feed.peek()
        if not is_listed and (not following or (yield from feed.is_at_mark())):
            return


def _read_call(feed: Feed, *, is_bare: bool) -> Steps:
    name = yield from feed.take_while(_NAME)
    has_name = bool(name) and name[0].isidentifier()
    if has_name:
        yield from feed.skip_blanks()
    if not has_name or not (yield from feed.has("(")):
        raise Malformed("") if is_bare else feed.unexpected()
    yield from feed.skip_blanks()
    has_arguments = not (yield from feed.has(")"))
    keyword = (yield from _keyword(feed, is_bare=is_bare)) if has_arguments else ""
    if is_bare and feed.tools and name not in feed.tools:
        raise Malformed(UNKNOWN_TOOL)
    feed.begin_call(name)
    while has_arguments:
        begin_parameter(feed, keyword)
        yield from stream_literal(feed, feed.add_arguments)
        yield from feed.skip_blanks()
        if (yield from feed.has(",")):
            yield from feed.skip_blanks()
            if (yield from feed.peek()) != ")":
                keyword = yield from _keyword(feed)
                continue
        if not (yield from feed.has(")")):
            raise feed.unexpected()
        break
    end_parameters(feed)


def _keyword(feed: Feed, *, is_bare: bool = False) -> TextSteps:
    keyword = yield from feed.take_while(_KEYWORD)
    yield from feed.skip_blanks()
    if not keyword or not (yield from feed.has("=")):
        raise Malformed("") if is_bare else feed.unexpected()
    yield from feed.skip_blanks()
    return keyword


FAMILY = ToolFamily(
    name="pythonic",
    readers={OPEN: _marked_reader(CLOSE), "[": _read_bare},
    closing_marks=(CLOSE,),
    hidden_marks=(OPEN, CLOSE),
    template_marks=(OPEN, "[func_name1(params_name1=params_value1"),
)


def _marked_family(name: str, opening: str, closing: str, *, is_hidden: bool = False) -> ToolFamily:
    """Returns a family with calls only between two marks. `is_hidden`: the marks are special tokens."""
    return ToolFamily(
        name=name,
        readers={opening: _marked_reader(closing)},
        closing_marks=(closing,),
        hidden_marks=(opening, closing) if is_hidden else (),
        template_marks=(opening,),
    )


OLMO3 = _marked_family("olmo3", opening="<function_calls>", closing="</function_calls>")
LFM2 = _marked_family("lfm2", opening="<|tool_call_start|>", closing="<|tool_call_end|>", is_hidden=True)
