"""Any text in any parser: it never raises, the pieces do not matter, and the work is linear in the text's length."""

from collections.abc import Sequence
from cProfile import Profile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.parsers.family import ToolFamily, WholeFamily
from services.frontend.parsers.marks import Marks
from services.frontend.parsers.parser import AnswerParser, answer_parser
from services.frontend.parsers.tables import REASONING_FAMILIES, TOOL_FAMILIES
from tests.conformance.parser_samples import FILES, SAMPLES, Outcome, joined

TOOLS = SAMPLES[0].tools
FRAGMENTS = (
    '{"name": "get_weather", "arguments": {"city": "Paris"}}', '{"name": "now", "parameters": ', "get_weather", "now", "city",
    "{", "}", "[", "]", "(", ")", '"', "'", "\\", "\\u12", ":", ",", ";", "=", ">", "<", "/", "|", "\n", " ", "\t", "1", "-2.5e3",
    "true", "None", "null", "functions.now:0", "日本", "🙂", "to=functions.now", "x",
)  # fmt: skip


def parser(tool: str, reasoning: str) -> AnswerParser:
    tools = TOOL_FAMILIES[tool] if tool else None
    return answer_parser(tools, REASONING_FAMILIES[reasoning] if reasoning else None, functions=TOOLS)


def parse(tool: str, reasoning: str, pieces: Sequence[str]) -> Outcome:
    reader = parser(tool, reasoning)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return joined([*parts, *reader.flush()])


def texts(tool: str, reasoning: str) -> st.SearchStrategy[list[str]]:
    """Generates texts from the families' marks and fragments between them, sometimes with a truncated recorded answer."""
    families = [TOOL_FAMILIES[tool]] if tool else []
    marks = {mark for family in families for mark in family.marks}
    marks |= REASONING_FAMILIES[reasoning].marks if reasoning else set()
    recorded = [sample.text for sample in SAMPLES if sample.tool_parser == tool or sample.reasoning_parser == reasoning]
    cut = st.builds(lambda text, at: text[:at], st.sampled_from(recorded or [""]), st.integers(0, 200))
    one = st.one_of(st.sampled_from(sorted(marks) or [""]), st.sampled_from(FRAGMENTS), cut, st.text(max_size=5))
    return st.lists(one, max_size=16)


PAIRS = [*((name, "") for name in TOOL_FAMILIES), *(("hermes", name) for name in REASONING_FAMILIES)]


@pytest.mark.parametrize(("tool", "reasoning"), PAIRS)
def test_any_text_in_any_pieces(tool: str, reasoning: str) -> None:
    """Parsing fragments, single characters and the whole text gives the same result."""

    @settings(max_examples=150, deadline=None)
    @given(texts(tool, reasoning))
    def check(pieces: list[str]) -> None:
        whole = parse(tool, reasoning, ["".join(pieces)])
        assert parse(tool, reasoning, pieces) == whole
        assert parse(tool, reasoning, "".join(pieces)) == whole

    check()


@pytest.mark.parametrize("tool", [name for name, each in TOOL_FAMILIES.items() if isinstance(each, ToolFamily)])
def test_no_text_is_lost(tool: str) -> None:
    """In a text without calls, everything is content except the marks of sections and lists."""

    @settings(max_examples=100, deadline=None)
    @given(texts(tool, ""))
    def check(pieces: list[str]) -> None:
        outcome = parse(tool, "", pieces)
        if not outcome.calls:
            assert bare(outcome.content) == bare("".join(pieces))

    family = TOOL_FAMILIES[tool]
    assert not isinstance(family, WholeFamily)
    tokens = family.mark_tokens
    marks = sorted(family.searched_marks, key=len, reverse=True)

    def bare(text: str) -> str:
        """Removes marks, also those that form when others are removed, and the tokens that marks consist of."""
        before = ""
        while before != text:
            before = text
            for mark in marks:
                text = text.replace(mark, "")
        for token in (*tokens, "[", "]"):
            text = text.replace(token, "")
        return "".join(text.split())

    check()


@pytest.mark.parametrize("tool", sorted(TOOL_FAMILIES))
def test_the_work_is_linear(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the text takes about ten times the work, whatever is repeated: marks, beginnings of calls, whitespace, or a long value."""
    searched = _count_searched(monkeypatch)
    samples = [sample.text for sample in FILES.get(tool, [])][:3]
    units = ["\n", "{", "[", "<", '"', *(text[: len(text) // 2] for text in samples)]
    # A long word after the beginning of an answer is often a value.
    values = [text[: len(text) * tenths // 10] for text in samples for tenths in (4, 6, 8)]
    for start, unit in [*(("", unit) for unit in units), *((start, "a") for start in values)]:
        short, long = (_work(searched, tool, start + unit * (count // len(unit))) for count in (1_000, 10_000))
        assert long < 20 * short, (start, unit, short, long)


def _count_searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes `Marks` add the number of characters that it searches to the first entry of the returned list."""
    searched = [0]
    find = Marks.find

    def find_and_count(marks: Marks, text: str, start: int) -> tuple[int, str] | None:
        found = find(marks, text, start)
        searched[0] += (found[0] if found else len(text)) - start
        return found

    monkeypatch.setattr(Marks, "find", find_and_count)
    return searched


def _work(searched: list[int], tool: str, text: str) -> int:
    """Parses the text in short pieces. Returns the number of calls of functions, plus that of searched characters.

    Unlike a time, it does not depend on the machine.
    """
    reader, profile, before = parser(tool, ""), Profile(), searched[0]
    profile.enable()
    for at in range(0, len(text), 4):
        reader.push(text[at : at + 4])
    reader.flush()
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats()) + searched[0] - before
