"""Parsers on damaged recorded answers: they never raise, give the same result for any pieces, and drop no text."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.parsers.family import WholeFamily
from services.frontend.parsers.parts import CallArguments, CallBegin, Reasoning, Warned
from services.frontend.parsers.tables import REASONING_FAMILIES, TOOL_FAMILIES, reasoning_family, tool_family
from tests.conformance.parser_samples import FILES, Sample

EXAMPLES = 60
MARKS = sorted({mark for family in (*TOOL_FAMILIES.values(), *REASONING_FAMILIES.values()) for mark in family.marks})
CRUMBS = [
    '{"',
    '"}',
    "}}",
    "]",
    "[",
    ", ",
    ":",
    "=",
    "\\",
    '\\"',
    "\\u12",
    "'",
    "<",
    ">",
    "</",
    "\n",
    " ",
    "null",
    "-1e",
    "\x00",
    "é🙂",
    "```",
]
WORD = "zq7zq"
JSON_CALLS = frozenset(
    "cohere_command gigachat3 granite granite_20b_fc hermes internlm jamba llama3_json longcat mistral nemotron phi4 xlam".split()
)
M3_MARK = "]<]minimax[>["


def own_marks(sample: Sample) -> list[str]:
    """Returns the marks of the sample's own families, whose damage reveals the most."""
    families = [tool_family(sample.tool_parser)] if sample.tool_parser else []
    marks = {mark for family in families for mark in family.marks}
    if sample.reasoning_parser:
        marks |= reasoning_family(sample.reasoning_parser).marks
    return sorted(marks)


@st.composite
def damaged(draw: st.DrawFn, name: str) -> tuple[Sample, str]:
    """Draws a sample, and its text after a few cuts, repetitions and insertions."""
    sample = draw(st.sampled_from(FILES[name]))
    text = sample.text
    crumbs = st.sampled_from([*own_marks(sample), *CRUMBS]) | st.sampled_from(MARKS) | st.text(max_size=3)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 24)))
        match draw(st.sampled_from(("cut", "double", "insert"))):
            case "cut":
                text = text[:start] + text[end:]
            case "double":
                text = text[:end] + text[start:]
            case _:
                text = text[:start] + draw(crumbs) + text[start:]
    return sample, text


@pytest.mark.parametrize("name", sorted(FILES))
def test_damaged_answers(name: str) -> None:
    """Parsing never raises, whatever the model writes, and does not depend on the pieces."""

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(damaged(name), st.sets(st.integers(0, 400), max_size=8))
    def check(case: tuple[Sample, str], cuts: set[int]) -> None:
        sample, text = case
        ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
        pieces = [text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        whole = sample.parse([text])
        assert sample.parse(pieces) == whole
        assert sample.parse(text) == whole

    check()


def all_text(sample: Sample, text: str) -> str:
    """Returns all text of an answer that a client receives."""
    parser = sample.parser()
    seen: list[str] = []
    for part in [*parser.push(text), *parser.flush()]:
        match part:
            case CallBegin():
                seen += [part.name, part.call_id]
            case CallArguments() | Reasoning():
                seen.append(part.text)
            case str():
                seen.append(part)
            case Warned():
                pass
    return "".join(seen)


def may_be_syntax(sample: Sample, before: str) -> bool:
    """Returns whether a word after `before` may be a part of a call's syntax that has no meaning."""
    is_quoted = before.count('"') % 2 == 1
    if sample.tool_parser in JSON_CALLS:
        # A member of the object other than the name and the arguments.
        return is_quoted and before.count("{") - before.count("}") <= 1
    if sample.tool_parser == "kimi_k3":
        return before.rfind("<|open|>") > before.rfind("<|sep|>")
    if sample.tool_parser == "minimax_m3" and M3_MARK in before and "nested" in sample.kinds:
        # Text between the elements of an object or a list.
        return True
    if sample.tool_parser == "kimi_k2":
        # The number after a call's name.
        return bool(re.fullmatch(r"[\w.]*:\w*", before.rpartition("<|tool_call_begin|>")[2]))
    if sample.tool_parser == "step3":
        # The type and the name before the invoke, which has the function's name again.
        _, mark, head = before.rpartition("<｜tool_call_begin｜>")
        if mark and "<steptml:invoke" not in head:
            return True
    # An attribute of a tag, or the type before DeepSeek's separator.
    _, mark, head = before.rpartition("<｜tool▁call▁begin｜>")
    return (is_quoted and before.rfind("<") > before.rfind(">")) or bool(mark and (head + "a").isalpha())


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_is_dropped(name: str) -> None:
    """A word that is inserted anywhere into an answer is returned as content, as reasoning, or as part of a call."""
    if isinstance(tool_family(FILES[name][0].tool_parser or "hermes"), WholeFamily):
        pytest.skip("words in channel headers are not text")

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        # In a truncated call, the syntax depends on where the family assumes its end.
        sample = data.draw(st.sampled_from([each for each in FILES[name] if "unfinished" not in each.kinds]))
        at = data.draw(st.integers(0, len(sample.text)))
        text = sample.text[:at] + WORD + sample.text[at:]
        assert WORD in all_text(sample, text) or may_be_syntax(sample, sample.text[:at])

    check()
