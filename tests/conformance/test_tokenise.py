"""The fast tokenizer gives the reference's tokens for every text, or is not used."""

import json
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from services.frontend.fast_tokenise import TEXTS, FastTokenizer, first_difference, load_fast, reference_ids

pytest.importorskip("fastokens")
ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo" / "tokenizer.json"
REFERENCE = Tokenizer.from_file(str(DEMO))
FAST = load_fast(DEMO, REFERENCE)
PIECES = [*TEXTS, *(token.content for token in REFERENCE.get_added_tokens_decoder().values())]
CORPUS = [*TEXTS, (ROOT / "README.md").read_text(encoding="utf-8")]


def test_the_demo_model_has_one() -> None:
    """It is exact for the model that everything here is measured with."""
    assert FAST is not None


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)), st.booleans())
def test_it_gives_the_same_tokens(text: str, adds_special_tokens: bool) -> None:
    """For any text, in the middle of special tokens too."""
    assert FAST is not None
    wanted = reference_ids(REFERENCE, text, adds_special_tokens=adds_special_tokens)
    assert FAST.encode(text, adds_special_tokens=adds_special_tokens) == wanted


def _installed() -> list[Path]:
    """Every tokenizer that some installed package or the local cache of models brings."""
    folders = [
        Path(sysconfig.get_paths()["purelib"]),
        Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser(),
    ]
    return sorted(path for folder in folders if folder.is_dir() for path in folder.rglob("tokenizer.json"))


def test_installed_tokenizers_are_exact_or_refused() -> None:
    """Of whatever is on this machine, however many that are; long texts and documents too."""
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


def test_one_that_differs_is_not_used(tmp_path: Path) -> None:
    """One rule less is enough."""
    body = json.loads(DEMO.read_text(encoding="utf-8"))
    body["normalizer"] = {"type": "Lowercase"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    assert load_fast(path, REFERENCE) is None


def test_a_file_that_it_cannot_read_is_left_to_the_reference(tmp_path: Path) -> None:
    """No failure of it keeps a model from being served."""
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"type": "Nothing"}}', encoding="utf-8")
    assert load_fast(path, REFERENCE) is None


def test_a_text_that_it_cannot_take_goes_to_the_reference() -> None:
    """Whatever it raises."""

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
    """Nothing between: what passes the check agrees on the texts and on a whole document."""
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
