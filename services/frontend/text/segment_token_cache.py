"""The tokens of a conversation's earlier turns, kept, so that its next turn has only its new part tokenised.

A text can be cut before certain special tokens without changing any token: tokenizers take special tokens out of a text first and
treat what lies between them by itself. Chat templates put such tokens between messages. So a prompt is cut there into segments, and a
segment that was seen before is not tokenised again, whoever's conversation it was in: a long system prompt counts as well.

Where to cut is told by the tokenizer's own rules (`find_safe_cuts`) and proven on samples when a model is loaded (`find_cuts`).
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock

from tokenizers import AddedToken, Tokenizer

Encode = Callable[[str], "array[int]"]
SEGMENT_CHARACTERS_MIN = 512
"""Shorter stretches between two cuts are taken together with the next one: looking one up has its price too."""
CUTS_MAX = 4
SAMPLES = (
    "", " ", "\n", "x", " x", "x ", "Hello, world!", "\n\nuser\nHi", " 's", "12 345", "e\u0301", "\u4f60\u597d",
    "\U0001f468\u200d\U0001f469", "<", "<|", "|>", "\u2581a", "a\u2581", "\t\tif x:\n", "it's", "\u00a0", "\x00",
)  # fmt: skip


class SegmentTokenCache:
    """Encodes like `encode`, which may be any function that can be cut before `cuts`. For any thread.

    1. It holds segments of at most `characters_max` characters together; the least recently used go first.
    2. Segments of different salts never meet.
    """

    def __init__(self, encode: Encode, cuts: Sequence[str], *, characters_max: int) -> None:
        self._encode = encode
        self._cut = CutFinder(cuts)
        self._characters_max = characters_max
        self._segments: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._characters = 0
        self._lock = Lock()
        self.characters_known = 0
        """Of all texts so far, how much was not tokenised again."""

    @property
    def characters(self) -> int:
        """Held now."""
        return self._characters

    def encode(self, text: str, *, salt: str = "") -> "array[int]":
        """Token ids of a text, without special tokens around it."""
        if len(text) < 2 * SEGMENT_CHARACTERS_MIN:
            return self._encode(text)
        token_ids = array("I")
        *stable, last = segments(text, self._cut)
        for segment in stable:
            token_ids += self._segment(salt, segment)
        # The last segment is where the next turn goes on, so it will not come again as it is.
        token_ids += self._encode(last)
        return token_ids

    def _segment(self, salt: str, segment: str) -> "array[int]":
        key = (salt, segment)
        with self._lock:
            known = self._segments.get(key)
            if known is not None:
                self._segments.move_to_end(key)
                self.characters_known += len(segment)
                return known
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
    """What finds the next of some strings in one pass, however many there are."""

    def __init__(self, cuts: Sequence[str]) -> None:
        self._cut = re.compile("|".join(map(re.escape, cuts)))
        self._first = cuts[0][0] if len({cut[0] for cut in cuts}) == 1 else ""

    def search(self, text: str, begin: int) -> re.Match[str] | None:
        """The first one at or after `begin`. What they all begin with is rare in most texts, and found thirty times as fast."""
        if self._first and (begin := text.find(self._first, begin)) < 0:
            return None
        return self._cut.search(text, begin)


def segments(text: str, cut: CutFinder) -> Iterator[str]:
    """The text in segments of at least SEGMENT_CHARACTERS_MIN, each but the first beginning with a cut; at least one segment.

    Where a segment ends depends on what comes before only, so that a text and its continuation begin with the same segments.
    """
    begin = 0
    while found := cut.search(text, begin + SEGMENT_CHARACTERS_MIN):
        yield text[begin : found.start()]
        begin = found.start()
    yield text[begin:]


def find_cuts(tokenizer: Tokenizer, template_source: str, encode: Encode) -> Sequence[str]:
    """Where prompts of a chat template may be cut; empty when nothing is safe or a sample shows that it is not."""
    safe = [cut for cut in find_safe_cuts(tokenizer.get_added_tokens_decoder().values()) if cut in template_source]
    cuts = safe[:CUTS_MAX]
    for cut in cuts:
        for before in SAMPLES:
            for after in SAMPLES:
                if encode(before + cut + after) != encode(before) + encode(cut + after):
                    return ()
    return cuts


def find_safe_cuts(added: Iterable[AddedToken]) -> list[str]:
    """Added tokens that are found in a text before anything else happens to it, whatever stands before them.

    Not those that swallow white space on their left, that must stand alone, or that are looked for in the normalised text; nor
    those that another one could have begun to match before them.
    """
    tokens = list(added)
    contents = [token.content for token in tokens]
    return [
        token.content
        for token in tokens
        if token.special
        and not (token.normalized or token.lstrip or token.single_word)
        and len(token.content) > 1
        and not any(_overlaps(other, token.content) for other in contents)
    ]


def _overlaps(other: str, token: str) -> bool:
    """Whether an occurrence of `other` could begin before one of `token` and reach into it."""
    return any(token.startswith(other[start:]) or other.startswith(token, start) for start in range(1, len(other)))
