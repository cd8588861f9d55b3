"""Tokenises with fastokens, which reads the same files as the reference library and is ten times as fast.

It is optional. A model uses it only if it gave the same tokens as the reference for texts on which tokenizers tend to differ:
white space, scripts and marks, numbers, contractions, code, every special token, and mixtures of all of them. Texts that it
refuses go to the reference.
"""

import importlib.util
import json
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Protocol

from tokenizers import Tokenizer

from kvmesh.event_log import event_logger
from kvmesh.kv.blocks import unpack_tokens

_log = event_logger(__name__)
CONTRACTIONS = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'s|'t|'re|'ve|'m|'ll|'d", "'(?:[sdmt]|ll|ve|re)")
LETTERS = r"| ?\p{L}+|"
WORD = r" ?[A-Za-z]++(?![^\x00-\x7f])|"
"""ASCII letters that no other character beyond ASCII follows: as many as the expression's own alternative would match."""
PACKAGE = "fastokens"
MIXTURES = 200
PIECES_MAX = 40
_PANIC = "PanicException"
TEXTS = (
    "", " ", "  ", "\n", " \n", "\n\n  x", "\t\tx", "a\r\nb", "x ", " x", "x  y   z", "\u00a0x\u2003y\u2028z\u3000",
    "Hello, world!", "it's we'll I'M YOU'RE they've don't", "1 12 123 1234 12345678 3.14 1,000,000 0x1F \u0663\u0664\u0665",
    "Gr\u00fc\u00dfe na\u00efve \u00e9 e\u0301 \u1e9b\u0323 \ufb01 \u212b \u2460",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \uc548\ub155",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # done\n\n\n", "<p class=\"a\">&amp;</p>", "a_b-c.d/e\\f:g;h|i~j`k^l@m#n$o%p",
    "\u2581\u2581x \u0120y \u010az", "\x00\x01\x7f\ufeff\ufffd", "x" * 300, "ab " * 200, "\n" * 50, "!?" * 60,
)  # fmt: skip
"""Texts on which different tokenizer implementations tend to differ."""


class Tokenise(Protocol):
    """A tokenizer, as a function."""

    def __call__(self, text: str, *, adds_special_tokens: bool) -> "array[int]":
        """Returns the token ids of a text as 32-bit words, their form on the wire."""
        ...


class FastTokenizer:
    """Encodes like the reference. Thread-safe."""

    def __init__(self, fast: Any, reference: Tokenizer) -> None:
        self._fast = fast
        self._reference = reference

    def encode(self, text: str, *, adds_special_tokens: bool) -> "array[int]":
        """Returns the token ids of a text."""
        try:
            # Only the batch call returns packed words instead of a Python number for each token.
            words, _ = self._fast.encode_batch_flat([text], add_special_tokens=adds_special_tokens)
            return unpack_tokens(words)
        except Exception as error:  # noqa: BLE001 (the reference decides whether the text is invalid; logged)
            _log.info("fast_tokenizer_refused", error=type(error).__name__, characters=len(text))
        except BaseException as error:
            # A panic of the Rust library is not an Exception, but must not end this process.
            if type(error).__name__ != _PANIC:
                raise
            _log.warning("fast_tokenizer_failed", characters=len(text))
        return reference_ids(self._reference, text, adds_special_tokens=adds_special_tokens)


def reference_ids(reference: Tokenizer, text: str, *, adds_special_tokens: bool) -> "array[int]":
    """Returns the token ids by the reference library."""
    # Only the batch call omits offsets, which saves a quarter of the time.
    (encoding,) = reference.encode_batch_fast([text], add_special_tokens=adds_special_tokens)
    return array("I", encoding.ids)


def load_fast(path: Path, reference: Tokenizer) -> FastTokenizer | None:
    """Loads a tokenizer.json with fastokens. Returns None if the package is missing or differs from the reference."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    import fastokens

    try:
        text = path.read_text(encoding="utf-8")
        fast = fastokens.Tokenizer.from_json_str(add_word_alternative(text) or text)
        differing = first_difference(fast, reference)
    except BaseException as error:
        # The reference reads files that fastokens cannot; see `encode` for panics.
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        _log.info("fast_tokenizer_unfit", path=str(path), error=type(error).__name__)
        return None
    if differing is not None:
        _log.warning("fast_tokenizer_differs", path=str(path), sample=ascii(differing)[:80])
        return None
    return FastTokenizer(fast, reference)


def first_difference(fast: Any, reference: Tokenizer) -> str | None:
    """Returns the first sample on which the two differ; None if there is none."""
    marks = [token.content for token in reference.get_added_tokens_decoder().values()]
    for text in (*TEXTS, *marks, *islice(_mixtures((*TEXTS, *marks)), MIXTURES)):
        for adds_special_tokens in (False, True):
            wanted = reference_ids(reference, text, adds_special_tokens=adds_special_tokens)
            words, _ = fast.encode_batch_flat([text], add_special_tokens=adds_special_tokens)
            if unpack_tokens(words) != wanted:
                return text
    return None


def _mixtures(texts: Sequence[str]) -> Iterator[str]:
    """Yields concatenations of random pieces of the texts, the same ones each time."""
    random = Random(20_000)
    while True:
        pieces = []
        for _ in range(random.randint(2, PIECES_MAX)):
            text = random.choice(texts)
            start = random.randrange(len(text) + 1)
            pieces.append(text[start : start + random.randint(1, 12)] if random.random() < 0.7 else text[:24])
        yield "".join(pieces)


def add_word_alternative(tokenizer_json: str) -> str | None:
    """Adds a first alternative that matches ASCII words to a tokenizer's regular expression. None if that gains nothing.

    Byte-level tokenizers split a text with one expression, tried once per token: most of the time of tokenising. fastokens
    recognises some forms of it and splits them by hand. Those of GPT-2's kind run as a regular expression and look up the
    class of every letter.

    The result is the same. A match that begins with a letter, or with a space and a letter, is no contraction, since these
    begin with an apostrophe; the next alternative matches the space and all letters. `WORD` matches the same if these letters
    and the character after them are ASCII; the possessive `++` prevents a shorter match.
    """
    if json.dumps(LETTERS)[1:-1] not in tokenizer_json:
        return None  # For most tokenizers it would parse megabytes of JSON without a result.
    document = json.loads(tokenizer_json)
    patterns = [each for each in _patterns(document.get("pre_tokenizer")) if _gains(each["Regex"])]
    for pattern in patterns:
        pattern["Regex"] = WORD + pattern["Regex"]
    return json.dumps(document) if patterns else None


def _gains(expression: str) -> bool:
    return expression.startswith(tuple(each + LETTERS for each in CONTRACTIONS))


def _patterns(part: Any) -> Iterator[dict[str, str]]:
    """Yields the expressions that split texts, wherever they are in a sequence of pre-tokenizers."""
    if not isinstance(part, dict):
        return
    for each in part.get("pretokenizers") or ():
        yield from _patterns(each)
    pattern = part.get("pattern")
    if part.get("type") == "Split" and isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        yield pattern
