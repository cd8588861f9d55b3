"""Tests every tool and reasoning parser with recorded answers: whole, token by token, split at every position, and split at random."""

from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.frontend.parsers.family import WholeFamily
from services.frontend.parsers.marks import marks_of
from services.frontend.parsers.tables import REASONING_FAMILIES, TOOL_FAMILIES, tool_family
from tests.conformance.parser_samples import (
    FILES,
    REASONING_KINDS,
    SAMPLES,
    SAMPLES_MIN,
    TOOL_KINDS,
    Sample,
)

TEXT_SAMPLES = [
    sample
    for sample in SAMPLES
    if not sample.reasoning_parser and not isinstance(tool_family(sample.tool_parser), WholeFamily)
]
"""Samples without marks of reasoning and channels, which parsers remove from the text."""
MODEL = Path(__file__).parents[2] / "models" / "demo"


@lru_cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def token_pieces(text: str) -> list[str]:
    """Splits the text where the demo model's tokens end, as a stream would."""
    encoding = tokenizer().encode(text, add_special_tokens=False)
    ends = sorted({end for _, end in encoding.offsets} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_whole(sample: Sample) -> None:
    """The recorded answer gives the recorded parts."""
    sample.check(sample.parse([sample.text]))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_streamed_equals_whole(sample: Sample) -> None:
    """Token by token, character by character, and split at every position, the outcome is the same as for the whole text."""
    whole = sample.parse([sample.text])
    assert sample.parse(token_pieces(sample.text)) == whole
    assert sample.parse(sample.text) == whole
    for at in range(len(sample.text) + 1):
        assert sample.parse([sample.text[:at], sample.text[at:]]) == whole, at


@pytest.mark.parametrize("name", sorted(FILES))
def test_random_splits(name: str) -> None:
    """Any split of any prefix of a sample gives the same outcome as the unsplit prefix."""

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        sample = data.draw(st.sampled_from(FILES[name]))
        text = sample.text[: data.draw(st.integers(0, len(sample.text)))]
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert sample.parse(pieces) == sample.parse([text])

    check()


@pytest.mark.parametrize("sample", TEXT_SAMPLES, ids=lambda sample: sample.id)
def test_no_text_is_dropped(sample: Sample) -> None:
    """Wherever an answer is cut off: unless a call was read, all text is content, except marks that are special tokens."""
    family = tool_family(sample.tool_parser)
    assert not isinstance(family, WholeFamily)
    hidden = marks_of(frozenset(family.hidden_marks))
    for at in range(len(sample.text)):
        outcome = sample.parse([sample.text[:at]])
        if not outcome.calls:
            assert outcome.content.split() == hidden.removed(sample.text[:at]).split()


@pytest.mark.parametrize("name", sorted(TOOL_FAMILIES))
def test_every_tool_family_has_samples(name: str) -> None:
    """Each tool family has at least twelve samples, and one of every kind."""
    samples = [sample for sample in SAMPLES if sample.tool_parser == name]
    assert len(samples) >= SAMPLES_MIN
    assert not TOOL_KINDS - {kind for sample in samples for kind in sample.kinds}


@pytest.mark.parametrize("name", sorted(REASONING_FAMILIES))
def test_every_reasoning_family_has_samples(name: str) -> None:
    """Each reasoning family has at least twelve samples, and one of every kind."""
    samples = [sample for sample in SAMPLES if sample.reasoning_parser == name]
    assert len(samples) >= SAMPLES_MIN
    assert not REASONING_KINDS - {kind for sample in samples for kind in sample.kinds}
