"""GLM 4.5 to 4.7 and Hunyuan 3: `<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>`; from 4.7 on without
the line ends. Hunyuan has `<tool_sep>` behind the name, a section around the calls, and in its open models the suffix
`:opensource` in every mark."""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import NAME_CHARACTERS_MAX, Doubts, Feed, Malformed, Reader, Steps
from services.frontend.parsers.json_text import quoted
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parts import MALFORMED, TRUNCATED
from services.frontend.parsers.readers import read_section, unexpected
from services.frontend.parsers.typed_values import ANYTHING, stream_typed, types_of

SUFFIX = ":opensource"


def _closed(mark: str) -> str:
    return "</" + mark[1:]


def _reader(suffix: str) -> Reader:
    """`suffix`: of the words in the marks."""
    section, opening, separator, key, value = (
        f"<{word}{suffix}>" for word in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    )
    name_ends = Marks((key, _closed(opening), separator, opening, "\n", "{"))
    key_ends = Marks((_closed(key), "\n", _closed(opening)))
    doubtful = (_closed(opening), opening, key, section, _closed(section))
    value_ends = Marks((_closed(value), *doubtful))
    doubts = Doubts(doubtful, end=_closed(value), others=(key, value))

    def read(feed: Feed) -> Steps:
        yield from feed.skip_blanks()
        function = (yield from feed.take_until(name_ends, NAME_CHARACTERS_MAX)).strip()
        yield from feed.skip_blanks()
        if (yield from feed.has(separator)):
            yield from feed.skip_blanks()
        has_keys = yield from feed.has(key)
        if not function or not (has_keys or (yield from feed.has(_closed(opening)))):
            raise Malformed(MALFORMED if (yield from feed.peek()) else TRUNCATED)
        feed.begin_call(function)
        if has_keys:
            yield from read_arguments(feed, function)
        else:
            feed.add_arguments("{}")

    def read_arguments(feed: Feed, function: str) -> Steps:
        """From behind the first key's mark to behind the closing mark."""
        comma = "{"
        while True:
            name = (yield from feed.take_until(key_ends, NAME_CHARACTERS_MAX)).strip()
            yield from feed.expect(_closed(key))
            yield from feed.skip_blanks()
            yield from feed.expect(value)
            feed.add_arguments(f"{comma}{quoted(name)}: ")
            comma = ", "
            yield from stream_typed(feed, value_ends, types_of(feed, function, name, unknown=ANYTHING), doubts)
            yield from feed.has(_closed(value))
            feed.settle()
            yield from feed.skip_blanks()
            if (yield from feed.has(key)):
                continue
            if not (yield from feed.has(_closed(opening))) and not (yield from feed.is_at_mark()):
                raise unexpected(feed, key, _closed(opening))
            feed.add_arguments("}")
            return

    return read


FAMILY = ToolFamily(
    name="glm45",
    readers={"<tool_call>": _reader("")},
    closing_marks=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    template_marks=("<arg_key>",),
)


def _section_reader(suffix: str) -> Reader:
    read_call = _reader(suffix)

    def read(feed: Feed) -> Steps:
        yield from read_section(feed, f"<tool_call{suffix}>", read_call, f"</tool_calls{suffix}>")

    return read


def _hunyuan() -> ToolFamily:
    readers: dict[str, Reader] = {}
    closing: list[str] = []
    for suffix in ("", SUFFIX):
        readers |= {f"<tool_calls{suffix}>": _section_reader(suffix), f"<tool_call{suffix}>": _reader(suffix)}
        closing += [f"<{word}{suffix}>" for word in ("tool_sep", "arg_key", "arg_value")]
        closing += [f"</{word}{suffix}>" for word in ("tool_calls", "tool_call", "arg_key", "arg_value")]
    return ToolFamily(
        name="hy_v3",
        readers=readers,
        closing_marks=closing,
        template_marks=("<tool_sep>", f"<tool_sep{SUFFIX}>"),
    )


HY_V3 = _hunyuan()
