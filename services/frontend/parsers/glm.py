"""GLM 4.5 to 4.7 and Hunyuan 3: `<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>`; from 4.7 on without
the line breaks. Hunyuan has `<tool_sep>` after the name, a section around the calls, and in its open models the suffix
`:opensource` in every mark."""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Feed, Reader, Steps, ValueEnds
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parameters import ANYTHING, end_parameters, stream_parameter, types_of
from services.frontend.parsers.readers import section_reader

SUFFIX = ":opensource"


def _closed(mark: str) -> str:
    return "</" + mark[1:]


def _call_reader(suffix: str) -> Reader:
    """`suffix`: the end of the word in each mark."""
    section, opening, separator, key, value = (
        f"<{word}{suffix}>" for word in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    )
    closing = _closed(opening)
    name_ends = Marks((key, closing, separator, opening, "\n", "{"))
    key_ends = Marks((_closed(key), "\n", closing))
    value_ends = ValueEnds(
        _closed(value), doubtful=(closing, opening, key, section, _closed(section)), deciding=(key, value)
    )

    def read(feed: Feed) -> Steps:
        yield from feed.skip_blanks()
        function = (yield from feed.take_until(name_ends, NAME_CHARACTERS_MAX)).strip()
        yield from feed.skip_blanks()
        if (yield from feed.has(separator)):
            yield from feed.skip_blanks()
        has_keys = yield from feed.has(key)
        if not function or not (has_keys or (yield from feed.has(closing))):
            raise feed.unexpected()
        feed.begin_call(function)
        while has_keys:
            name = (yield from feed.take_until(key_ends, NAME_CHARACTERS_MAX)).strip()
            yield from feed.expect(_closed(key))
            yield from feed.skip_blanks()
            yield from feed.expect(value)
            types = types_of(feed, function, parameter=name, unknown=ANYTHING)
            yield from stream_parameter(feed, name, value_ends, types=types)
            yield from feed.skip_blanks()
            has_keys = yield from feed.has(key)
            if not has_keys and not (yield from feed.has(closing)) and not (yield from feed.is_at_mark()):
                raise feed.unexpected(key, closing)
        end_parameters(feed)

    return read


FAMILY = ToolFamily(
    name="glm45",
    readers={"<tool_call>": _call_reader("")},
    closing_marks=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    template_marks=("<arg_key>",),
)


def _hunyuan() -> ToolFamily:
    readers: dict[str, Reader] = {}
    closing: list[str] = []
    for suffix in ("", SUFFIX):
        section, opening = f"<tool_calls{suffix}>", f"<tool_call{suffix}>"
        readers[opening] = _call_reader(suffix)
        readers[section] = section_reader(opening, readers[opening], _closed(section))
        closing += [f"<{word}{suffix}>" for word in ("tool_sep", "arg_key", "arg_value")]
        closing += [f"</{word}{suffix}>" for word in ("tool_calls", "tool_call", "arg_key", "arg_value")]
    return ToolFamily(
        name="hy_v3",
        readers=readers,
        closing_marks=closing,
        template_marks=("<tool_sep>", f"<tool_sep{SUFFIX}>"),
    )


HY_V3 = _hunyuan()
