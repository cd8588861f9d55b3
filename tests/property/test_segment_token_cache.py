"""Cached segments of prompts give the tokens of the whole prompt, or are not used."""

from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from kvmesh.clock import SystemClock
from services.frontend.pipeline.request import Conversation
from services.frontend.text.fast_tokenise import TEXTS, reference_ids
from services.frontend.text.segment_token_cache import (
    SEGMENT_CHARACTERS_MIN,
    CutFinder,
    SegmentTokenCache,
    find_cuts,
    find_safe_cuts,
    segments,
)
from services.frontend.text.text_model import load_text_model

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
REFERENCE = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
CUTS = ("<|im_start|>", "<|im_end|>")
MODELS = {
    is_fast: load_text_model(DEMO, SystemClock(), is_fast=is_fast, cached_characters_max=20_000)
    for is_fast in (True, False)
}
MARKS = [token.content for token in REFERENCE.get_added_tokens_decoder().values()]
CONTENTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from([*TEXTS, *MARKS, "<|im_", "start|>", "<", "|>"]), max_size=8).map("".join),
    st.sampled_from([text * 40 for text in ("word ", "naïve 日本語\n", "<|im_end|>", "  ")]),
)


@pytest.mark.parametrize("is_fast", [True, False])
@settings(max_examples=150, deadline=None)
@given(turns=st.lists(CONTENTS, min_size=1, max_size=12), salt=st.sampled_from(["", "a"]))
def test_every_turn_has_the_tokens_of_the_whole_text(is_fast: bool, turns: list[str], salt: str) -> None:
    """The conversation grows, and its messages may contain anything, including special tokens and parts of them."""
    model = MODELS[is_fast]
    assert model._segment_cache is not None
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    for count in range(1, len(messages) + 1):
        text = model.template.render(Conversation(messages=messages[:count]))
        assert model.tokenise_prompt(text, salt=salt) == reference_ids(REFERENCE, text, adds_special_tokens=False)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "x" * 100, "y" * 700, "<|im_"]), max_size=30).map("".join)
)
def test_a_text_and_its_continuation_share_their_segments(text: str) -> None:
    """The segments join to the text. All but the last are also the first segments of any continuation."""
    found = list(segments(text, CutFinder(CUTS)))
    assert "".join(found) == text
    assert all(segment.startswith(CUTS) for segment in found[1:])
    assert all(len(segment) >= SEGMENT_CHARACTERS_MIN for segment in found[:-1])
    longer = list(segments(text + "<|im_start|>user\n" + "z" * 2000 + "<|im_end|>", CutFinder(CUTS)))
    assert longer[: len(found) - 1] == found[:-1]


def test_only_the_new_part_is_tokenised() -> None:
    """Only the new part of the next turn is tokenised, but the whole prompt if another tenant sends it with another salt."""
    encoded: list[str] = []

    def encode(text: str) -> "array[int]":
        encoded.append(text)
        return reference_ids(REFERENCE, text, adds_special_tokens=False)

    memory = SegmentTokenCache(encode, CUTS, characters_max=100_000)
    first = (
        "<|im_start|>system\n"
        + "Be brief. " * 500
        + "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    memory.encode(first)
    encoded.clear()
    second = first + "Hello!<|im_end|>\n<|im_start|>user\nWhat now?<|im_end|>\n<|im_start|>assistant\n"
    memory.encode(second)
    assert sum(map(len, encoded)) < 200
    encoded.clear()
    memory.encode(second, salt="b")
    assert "".join(encoded) == second


def test_the_cache_is_bounded() -> None:
    """The least recently used segments are evicted. A segment that exceeds the limit is not cached."""
    encoded: list[str] = []

    def encode(text: str) -> "array[int]":
        encoded.append(text)
        return array("I", [len(text)])

    memory = SegmentTokenCache(encode, CUTS, characters_max=5000)
    texts = [f"<|im_start|>{number}" + "x" * 1500 + "<|im_end|>" for number in range(20)]
    for text in texts:
        memory.encode(text)
        assert memory.characters <= 5000
    encoded.clear()
    memory.encode(texts[-1])
    assert len("".join(encoded)) < len(texts[-1])
    encoded.clear()
    memory.encode(texts[0])
    assert "".join(encoded) == texts[0]
    memory.encode("<|im_start|>" + "y" * 6000 + "<|im_end|>")
    assert memory.characters <= 5000


def added(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, **{"special": True, "normalized": False, **flags})


def test_cuts_are_tokens_that_do_not_depend_on_their_neighbours() -> None:
    """Tokens that depend on the text before them, or that can overlap others, are not cuts."""
    assert find_safe_cuts([added("<a>"), added("<b>")]) == ["<a>", "<b>"]
    assert (
        find_safe_cuts([added("<a>", lstrip=True), added("<b>", normalized=True), added("<c>", single_word=True)]) == []
    )
    assert find_safe_cuts([added("<a>"), added("x<a")]) == ["x<a"]
    assert find_safe_cuts([added("<a>"), added("<<a>>")]) == ["<<a>>"]
    assert find_safe_cuts([added("aba")]) == []
    assert find_safe_cuts([AddedToken("<a>", special=False, normalized=False)]) == []


def test_a_tokenizer_that_depends_on_text_across_a_cut_is_detected() -> None:
    """Samples detect cases that the rules miss, such as a space before every text except the first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    tokenizer.add_special_tokens([added("<a>")])

    def encode(text: str) -> "array[int]":
        return reference_ids(tokenizer, text, adds_special_tokens=False)

    assert find_cuts(tokenizer, "no such mark", encode) == []
    assert list(find_cuts(tokenizer, "{{ '<a>' }}", lambda text: array("I", [len(text), *encode(text)]))) == []
    for before in TEXTS:
        for cut in find_cuts(tokenizer, "<a>", encode):
            assert encode(before + cut + "x") == encode(before) + encode(cut + "x")


@given(st.text("<|ab", max_size=40), st.sampled_from((("<|a", "<b"), ("<|a", "b|"))), st.integers(0, 5))
def test_the_next_cut_is_the_first_one(text: str, cuts: tuple[str, ...], begin: int) -> None:
    """The cuts may or may not have a common beginning."""
    wanted = min((at for cut in cuts if (at := text.find(cut, begin)) >= 0), default=None)
    found = CutFinder(cuts).search(text, begin)
    assert (found.start() if found else None) == wanted
