"""Detokenising in pieces, compared with decoding the whole."""

import json
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from services.frontend.text.detokenise import ByteDetokeniser, Detokenisers, WindowDetokeniser

CORPUS = ["the cat sat on the mat, naïve café, 日本語のテキスト, привет мир, 🙂👍🏽 and so on"]
SPECIAL = ["<|end|>", "<|user|>"]


@lru_cache
def byte_level() -> Tokenizer:
    """A byte-level tokenizer like GPT-2's, Llama 3's and Qwen's. An added token is not special and has letters outside the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool 日>"), AddedToken("naïve")])
    return tokenizer


@lru_cache
def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's, with word pieces that mark spaces, and byte tokens for text that the vocabulary lacks."""
    vocabulary = {"<unk>": 0, "<|end|>": 1}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in ("▁", "▁the", "▁cat", "▁sat", "c", "a", "t", "é", "h", "e", ",", "."):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "model": {
                    "type": "BPE",
                    "vocab": vocabulary,
                    "merges": [],
                    "unk_token": "<unk>",
                    "byte_fallback": True,
                },
            }
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, skip: bool) -> list[str]:
    """Returns the pieces that the detokeniser emits if tokens arrive in groups that end at `cuts`."""
    detokeniser = Detokenisers(tokenizer).detokeniser(skip_special_tokens=skip)
    pieces, start = [], 0
    for cut in [*sorted({min(cut, len(ids)) for cut in cuts} - {0}), len(ids)]:
        if cut > start:
            pieces.append(detokeniser.push(ids[start:cut]))
            start = cut
    return [*pieces, detokeniser.flush()]


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Returns one token per byte, for either kind of tokenizer."""
    table = Detokenisers(tokenizer)
    if tokenizer.token_to_id("<0x00>") is None:
        return [next(i for i in range(300) if table.token_bytes(i) == bytes([byte])) for byte in data]
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]


CUTS = st.lists(st.integers(0, 60), max_size=60)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), cuts=CUTS, skip=st.booleans())
def test_any_text_is_detokenised_completely(text: str, cuts: list[int], skip: bool) -> None:
    """The joined pieces equal the decoded whole, and no piece has an incomplete character."""
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        pieces = pieces_of(tokenizer, ids, cuts, skip=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
        if "\N{REPLACEMENT CHARACTER}" not in tokenizer.decode(ids, skip_special_tokens=skip):
            assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 520), max_size=50), cuts=CUTS, skip=st.booleans())
def test_any_byte_level_tokens_are_detokenised_completely(ids: list[int], cuts: list[int], skip: bool) -> None:
    """Sequences that no text gives are complete too: invalid characters, special tokens and ids beyond the vocabulary."""
    tokenizer = byte_level()
    assert "".join(pieces_of(tokenizer, ids, cuts, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 269), max_size=40), data=st.data())
def test_the_text_does_not_depend_on_the_groups(ids: list[int], data: st.DataObject) -> None:
    """The text is the same however many tokens arrive per step."""
    tokenizer = byte_fallback()
    one_by_one = pieces_of(tokenizer, ids, list(range(len(ids))), skip=True)
    assert "".join(pieces_of(tokenizer, ids, data.draw(CUTS), skip=True)) == "".join(one_by_one)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_split_character_waits_for_its_last_byte(make: object) -> None:
    """A four-byte character gives no text until it is complete. An incomplete one becomes U+FFFD at the end."""
    tokenizer = make()  # type: ignore[operator]
    # Each byte of the character is a token of its own.
    ids = byte_tokens(tokenizer, "😀".encode())
    detokeniser = Detokenisers(tokenizer).detokeniser(skip_special_tokens=True)
    assert [detokeniser.push([i]) for i in ids] == ["", "", "", "😀"]
    detokeniser = Detokenisers(tokenizer).detokeniser(skip_special_tokens=True)
    assert [detokeniser.push([i]) for i in ids[:2]] == ["", ""]
    assert set(detokeniser.flush()) == {"\N{REPLACEMENT CHARACTER}"}
    assert detokeniser.flush() == ""


def test_a_run_of_invalid_bytes_is_not_held_back() -> None:
    """A model that generates only invalid bytes gives replacement characters while it runs."""
    detokeniser = Detokenisers(byte_fallback()).detokeniser(skip_special_tokens=True)
    assert isinstance(detokeniser, WindowDetokeniser)
    pieces = [detokeniser.push([2 + 0xE4]) for _ in range(40)]
    assert sum(len(piece) for piece in pieces) >= 24


def test_a_run_of_tokens_without_text_costs_the_same_for_each() -> None:
    """Ids beyond the vocabulary have no text. However long a run of them is, each decodes a bounded number of tokens, and the text after the
    run keeps its space."""
    tokenizer, decoded = byte_fallback(), list[int]()

    class Counting:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            decoded.append(len(token_ids))
            return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    detokeniser = WindowDetokeniser(Counting())  # type: ignore[arg-type]
    hello, world = tokenizer.encode("hello", add_special_tokens=False).ids, tokenizer.encode("world").ids
    before = detokeniser.push(hello)
    assert {detokeniser.push([100_000]) for _ in range(1000)} == {""}
    after = detokeniser.push(world) + detokeniser.flush()
    assert before + after == tokenizer.decode(hello + world)
    assert max(decoded) < 100


def test_byte_level_tokenizers_use_the_fast_detokeniser() -> None:
    assert isinstance(Detokenisers(byte_level()).detokeniser(skip_special_tokens=True), ByteDetokeniser)
