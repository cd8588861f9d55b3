"""Parsers return arguments and reasoning while the model writes them, not only at the end of a call or of the answer."""

import pytest

from services.frontend.parsers.parts import CallArguments, CallBegin, Part, Reasoning
from services.frontend.parsers.tables import REASONING_FAMILIES, TOOL_FAMILIES
from tests.conformance.parser_samples import SAMPLES, Sample

LAYOUT_CHARACTERS_MAX = 1
"""The number of characters that a parser may hold back: the last character of a value may be layout, and a number ends only at the next
character."""


def first_single(name: str) -> Sample:
    """Returns a plain sample with one call whose argument is text."""
    calls = [("get_weather", {"city": "Paris"})]
    return next(s for s in SAMPLES if s.tool_parser == name and list(s.calls) == calls and "Paris" in s.text)


def fed(sample: Sample, text: str) -> list[Part]:
    """Feeds the text character by character. Returns the parts so far, without flushing."""
    parser = sample.parser()
    return [part for character in text for part in parser.push(character)]


@pytest.mark.parametrize("name", sorted(TOOL_FAMILIES))
def test_arguments_stream(name: str) -> None:
    """A call begins before its first value is complete. All but the last character of a long value has been returned."""
    sample = first_single(name)
    before, _, _ = sample.text.partition("Paris")
    long = "Paris and further on, word by word " * 20
    parts = fed(sample, before + long)
    assert [part.name for part in parts if isinstance(part, CallBegin)] == ["get_weather"]
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert long[:-LAYOUT_CHARACTERS_MAX] in arguments
    assert len(parts) > len(long) / 2, "the text was buffered"


@pytest.mark.parametrize("name", sorted(REASONING_FAMILIES))
def test_reasoning_streams(name: str) -> None:
    """All reasoning so far has been returned, except whitespace at its end."""
    samples = (sample for sample in SAMPLES if sample.reasoning_parser == name)
    sample = next(sample for sample in samples if sample.reasoning and sample.reasoning in sample.text)
    before, _, _ = sample.text.partition(sample.reasoning)
    long = "First, I think. Then I think more of it. " * 20
    reasoning = "".join(part.text for part in fed(sample, before + long) if isinstance(part, Reasoning))
    assert reasoning == long.rstrip()
