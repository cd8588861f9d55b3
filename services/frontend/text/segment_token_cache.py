"""A cache of tokens by segment of text, so that each turn of a conversation tokenises only its new part.

A text can be cut before certain special tokens without changing any token: tokenizers first extract special tokens and then
process the texts between them independently. Chat templates put such tokens between messages. A prompt is cut there into
segments, and a known segment is not tokenised again. Conversations share segments, such as a long system prompt.

The tokenizer's rules give the possible cuts (`find_safe_cuts`); samples verify them when a model is loaded (`find_cuts`).
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock

from tokenizers import AddedToken, Tokenizer

Encode = Callable[[str], "array[int]"]
SEGMENT_CHARACTERS_MIN = 512
"""Shorter segments are joined with the next one: below this length a lookup costs about as much as tokenising."""
CUTS_MAX = 4
SAMPLES = (
    "", " ", "\n", "x", " x", "x ", "Hello, world!", "\n\nuser\nHi", " 's", "12 345", "e\u0301", "\u4f60\u597d",
    "\U0001f468\u200d\U0001f469", "<", "<|", "|>", "\u2581a", "a\u2581", "\t\tif x:\n", "it's", "\u00a0", "\x00",
)  # fmt: skip


class SegmentTokenCache:
    """Encodes like `encode`, a function whose input can be cut before `cuts`. Thread-safe.

    1. It holds segments of at most `characters_max` characters in total and evicts the least recently used.
    2. Segments are never shared between salts.
    """

    def __init__(self, encode: Encode, cuts: Sequence[str], *, characters_max: int) -> None:
        self._encode = encode
        self._cut = CutFinder(cuts)
        self._characters_max = characters_max
        self._segments: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    @property
    def characters(self) -> int:
        """Characters of all segments in the cache."""
        return self._characters

    def encode(self, text: str, *, salt: str = "") -> "array[int]":
        """Returns the token ids of a text, without special tokens around it."""
        if len(text) < 2 * SEGMENT_CHARACTERS_MIN:
            return self._encode(text)
        token_ids = array("I")
        *stable, last = segments(text, self._cut)
        for segment in stable:
            token_ids += self._segment(salt, segment=segment)
        # The next turn extends the last segment, so the same segment will not come again.
        token_ids += self._encode(last)
        return token_ids

    def _segment(self, salt: str, segment: str) -> "array[int]":
        key = (salt, segment)
        with self._lock:
            known = self._segments.get(key)
            if known is not None:
                self._segments.move_to_end(key)
                return known
        # Not under the lock: two threads may tokenise the same segment, with the same result.
        found = self._encode(segment)
        with self._lock:
            if key not in self._segments and len(segment) <= self._characters_max:
                self._segments[key] = found
                self._characters += len(segment)
                while self._characters > self._characters_max:
                    (_, oldest), _ = self._segments.popitem(last=False)
                    self._characters -= len(oldest)
        return found


class CutFinder:
    """Finds the next of several strings in one pass."""

    def __init__(self, cuts: Sequence[str]) -> None:
        self._cut = re.compile("|".join(map(re.escape, cuts)))
        self._first = cuts[0][0] if len({cut[0] for cut in cuts}) == 1 else ""

    def search(self, text: str, begin: int) -> re.Match[str] | None:
        """Returns the first cut at or after `begin`. A common first character is searched first: thirty times as fast."""
        if self._first and (begin := text.find(self._first, begin)) < 0:
            return None
        return self._cut.search(text, begin)


def segments(text: str, cut: CutFinder) -> Iterator[str]:
    """Yields segments of at least SEGMENT_CHARACTERS_MIN characters. Each but the first begins with a cut.

    The end of a segment depends only on the text before it, so that a text and its continuation begin with equal segments.
    """
    begin = 0
    while found := cut.search(text, begin + SEGMENT_CHARACTERS_MIN):
        yield text[begin : found.start()]
        begin = found.start()
    yield text[begin:]


def find_cuts(tokenizer: Tokenizer, template_source: str, encode: Encode) -> Sequence[str]:
    """Returns the strings before which prompts of a chat template may be cut; empty if a sample shows that a cut is not safe."""
    safe = [cut for cut in find_safe_cuts(tokenizer.get_added_tokens_decoder().values()) if cut in template_source]
    cuts = safe[:CUTS_MAX]
    for cut in cuts:
        for before in SAMPLES:
            for after in SAMPLES:
                if encode(before + cut + after) != encode(before) + encode(cut + after):
                    return ()
    return cuts


def find_safe_cuts(added: Iterable[AddedToken]) -> list[str]:
    """Returns the added tokens that the tokenizer always extracts first, independent of the text before them.

    Excludes tokens that strip white space on their left, that match only as single words or in normalised text, and tokens
    that another added token may overlap.
    """
    tokens = list(added)
    contents = [token.content for token in tokens]
    return [
        token.content
        for token in tokens
        if token.special
        and not (token.normalized or token.lstrip or token.single_word)
        and len(token.content) > 1
        and not any(_overlaps(other, token=token.content) for other in contents)
    ]


def _overlaps(other: str, token: str) -> bool:
    """Returns whether an occurrence of `other` can begin before one of `token` and reach into it."""
    return any(token.startswith(other[start:]) or other.startswith(token, start) for start in range(1, len(other)))
