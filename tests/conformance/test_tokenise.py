"""The fast tokenizer gives the same tokens as the reference for every text, or is not used."""

import json
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from services.frontend.text.fast_tokenise import (
    CONTRACTIONS,
    LETTERS,
    TEXTS,
    FastTokenizer,
    add_word_alternative,
    first_difference,
    load_fast,
    reference_ids,
)

pytest.importorskip("fastokens")
ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo" / "tokenizer.json"
REFERENCE = Tokenizer.from_file(str(DEMO))
FAST = load_fast(DEMO, REFERENCE)
PIECES = [*TEXTS, *(token.content for token in REFERENCE.get_added_tokens_decoder().values())]
CORPUS = [*TEXTS, (ROOT / "README.md").read_text(encoding="utf-8")]


def test_the_demo_model_has_a_fast_tokenizer() -> None:
    """The fast tokenizer is exact for the demo model, which all benchmarks use."""
    assert FAST is not None


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)), st.booleans())
def test_it_gives_the_same_tokens(text: str, adds_special_tokens: bool) -> None:
    """The tokens are equal for any text, also in and around special tokens."""
    assert FAST is not None
    wanted = reference_ids(REFERENCE, text, adds_special_tokens=adds_special_tokens)
    assert FAST.encode(text, adds_special_tokens=adds_special_tokens) == wanted


def _of_kind(contractions: str, *, is_quick: bool) -> FastTokenizer:
    """Returns the demo model's tokenizer with another split expression."""
    import fastokens

    body = json.loads(DEMO.read_text(encoding="utf-8"))
    split = body["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    split["Regex"] = contractions + split["Regex"][split["Regex"].index(LETTERS) :]
    text = json.dumps(body)
    if is_quick:
        quick = add_word_alternative(text)
        assert quick is not None and quick != text
        text = quick
    return FastTokenizer(fastokens.Tokenizer.from_json_str(text), REFERENCE)


KINDS = [[_of_kind(each, is_quick=is_quick) for is_quick in (False, True)] for each in CONTRACTIONS]


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="aZs'\u2019 \t\n\r(-1\u0663\u00e9\u0301\u4e2d\u0130\u00a0\U0001f600", max_size=40))
def test_an_optimised_expression_splits_alike(text: str) -> None:
    """Each optimised expression splits like the original, also where ASCII meets other letters, marks, digits and spaces."""
    for plain, quick in KINDS:
        assert quick.encode(text, adds_special_tokens=False) == plain.encode(text, adds_special_tokens=False)


def test_other_expressions_stay_as_they_are() -> None:
    """Expressions that the tokenizer splits without a regular expression, and unknown ones, are not changed."""
    body = json.loads(DEMO.read_text(encoding="utf-8"))
    split = body["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    for change in (split["Regex"].replace(LETTERS, r"|[^\r\n\p{L}\p{N}]?\p{L}+|"), r"\d+" + LETTERS + split["Regex"]):
        split["Regex"] = change
        assert add_word_alternative(json.dumps(body)) is None
    assert add_word_alternative("{}") is None


def _installed() -> list[Path]:
    """Returns every tokenizer of the installed packages and of the local model cache."""
    folders = [
        Path(sysconfig.get_paths()["purelib"]),
        Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser(),
    ]
    return sorted(path for folder in folders if folder.is_dir() for path in folder.rglob("tokenizer.json"))


def test_installed_tokenizers_are_exact_or_refused() -> None:
    """For every tokenizer on this machine, the fast one gives the same tokens or is not used, also for long texts."""
    for path in [DEMO, *_installed()]:
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception:
            continue
        tokenizer.no_truncation()
        tokenizer.no_padding()
        fast = load_fast(path, tokenizer)
        for text in [*CORPUS, "".join(CORPUS) * 20] if fast is not None else ():
            for adds in (False, True):
                wanted = reference_ids(tokenizer, text, adds_special_tokens=adds)
                assert fast is not None
                assert fast.encode(text, adds_special_tokens=adds) == wanted, (path, text[:80])


def test_a_tokenizer_that_differs_is_not_used(tmp_path: Path) -> None:
    """A difference in one rule is enough to reject the fast tokenizer."""
    body = json.loads(DEMO.read_text(encoding="utf-8"))
    body["normalizer"] = {"type": "Lowercase"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    assert load_fast(path, REFERENCE) is None


def test_an_unreadable_file_is_left_to_the_reference(tmp_path: Path) -> None:
    """If the fast tokenizer cannot read the file, the model is still served with the reference."""
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"type": "Nothing"}}', encoding="utf-8")
    assert load_fast(path, REFERENCE) is None


def test_an_error_falls_back_to_the_reference() -> None:
    """If the fast tokenizer raises an error for a text, the reference encodes it."""

    class Broken:
        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            raise ValueError("match limit")

    given = FastTokenizer(Broken(), REFERENCE).encode("hi", adds_special_tokens=False)
    assert list(given) == REFERENCE.encode("hi").ids


def _bert() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]", "[CLS]"], show_progress=False)


def _unigram() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    return tokenizer, trainer


def _llama2() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return tokenizer, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)


def _gpt2() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)


@pytest.mark.parametrize("make", [_bert, _unigram, _llama2, _gpt2])
def test_any_family_is_exact_or_refused(make: Callable[[], tuple[Tokenizer, trainers.Trainer]], tmp_path: Path) -> None:
    """For each family of tokenizers, a fast tokenizer that passes the check gives the same tokens for all texts and a whole document."""
    tokenizer, trainer = make()
    tokenizer.train_from_iterator(CORPUS, trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    fast = load_fast(path, tokenizer)
    if fast is None:
        return
    assert first_difference(fast._fast, tokenizer) is None
    for text in CORPUS:
        assert fast.encode(text, adds_special_tokens=True) == reference_ids(tokenizer, text, adds_special_tokens=True)
