"""Makes up texts that match a regular expression, from the parse tree of Python's `re`."""

import re
import string
import warnings
from collections.abc import Callable, Mapping
from random import Random
from re import _constants as codes  # type: ignore[attr-defined]  # the parser is not part of re's public face
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from kvmesh.engines.simulated.documents import refused

REPEATS_MORE = 3
CHARACTERS_MAX = 65_536
_PRINTABLE = list(map(chr, range(32, 127)))
_WORD = string.ascii_letters + string.digits + "_"
_CATEGORIES: Mapping[Any, str] = {
    codes.CATEGORY_DIGIT: string.digits,
    codes.CATEGORY_WORD: _WORD,
    codes.CATEGORY_SPACE: " ",
    codes.CATEGORY_NOT_DIGIT: "".join(each for each in _PRINTABLE if each not in string.digits),
    codes.CATEGORY_NOT_WORD: "".join(each for each in _PRINTABLE if each not in _WORD),
    codes.CATEGORY_NOT_SPACE: "".join(each for each in _PRINTABLE if each != " "),
}
"""All printable characters of each category; negated classes subtract them."""


def make_match(pattern: str, random: Random) -> str:
    """Returns a text that the whole expression matches. The text is not verified, since matching can take exponential time."""
    try:
        with warnings.catch_warnings():
            # Warnings about syntax that a later Python may read differently.
            warnings.simplefilter("ignore", FutureWarning)
            tree = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise refused(f"a regular expression that does not parse ({error})", is_wrong=True) from error
    return _RegexMaker(random).sequence(tree, is_first=True, is_last=True)


class _RegexMaker:
    """Walks the parse tree. Keeps the texts of groups for back-references.

    `is_first` and `is_last`: the text begins or ends with this part, so an anchor holds here. Other anchors are refused.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._groups: dict[int, str] = {}
        self._length = 0

    def sequence(self, items: Any, *, is_first: bool, is_last: bool) -> str:
        parts = list(items)
        last = len(parts) - 1
        return "".join(
            self._item(code, argument, is_first=is_first and i == 0, is_last=is_last and i == last)
            for i, (code, argument) in enumerate(parts)
        )

    def _item(self, code: Any, argument: Any, *, is_first: bool, is_last: bool) -> str:
        if code is codes.AT:
            return self._anchor(argument, is_first=is_first, is_last=is_last)
        if code is codes.BRANCH:
            return self.sequence(self._random.choice(argument[1]), is_first=is_first, is_last=is_last)
        if code is codes.SUBPATTERN:
            return self._group(argument, is_first=is_first, is_last=is_last)
        make = _ITEMS.get(code)
        if make is None:
            raise refused(f"a regular expression with {str(code).lower()}")
        text = make(self, argument)
        self._length += len(text)
        if self._length > CHARACTERS_MAX:
            raise refused(f"a regular expression of more than {CHARACTERS_MAX} characters")
        return text

    def literal(self, argument: int) -> str:
        return chr(argument)

    def anything(self, _: Any) -> str:
        return self._random.choice(string.ascii_lowercase)

    def not_literal(self, argument: int) -> str:
        return self._random.choice([character for character in _PRINTABLE if ord(character) != argument])

    def one_of(self, argument: Any) -> str:
        items = list(argument)
        is_negated = bool(items) and items[0][0] is codes.NEGATE
        found = {character for item in items[is_negated:] for character in self._members(*item)}
        if is_negated:
            found = set(_PRINTABLE) - found
        if not found:
            raise refused("a character class without a printable character")
        # The order of a set of strings differs between processes, but a seed must give the same text.
        return self._random.choice(sorted(found))

    def _members(self, code: Any, argument: Any) -> list[str]:
        if code is codes.LITERAL:
            return [chr(argument)]
        if code is codes.CATEGORY:
            return list(_CATEGORIES[argument])
        low, high = argument
        return [chr(low + i) for i in range(min(high - low + 1, 4096))]

    def _anchor(self, argument: Any, *, is_first: bool, is_last: bool) -> str:
        is_begin = argument in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)
        is_end = argument in (codes.AT_END, codes.AT_END_STRING)
        if not (is_begin and is_first) and not (is_end and is_last):
            raise refused("a regular expression with an anchor inside")
        return ""

    def _group(self, argument: Any, *, is_first: bool, is_last: bool) -> str:
        number, added, removed, items = argument
        if added or removed:
            raise refused("a regular expression with flags")
        text = self.sequence(items, is_first=is_first, is_last=is_last)
        if number is not None:
            self._groups[number] = text
        return text

    def repeat(self, argument: Any) -> str:
        low, high, items = argument
        if low > CHARACTERS_MAX:
            raise refused(f"a regular expression of more than {CHARACTERS_MAX} characters")
        most = min(low + REPEATS_MORE, high if high is not codes.MAXREPEAT else low + REPEATS_MORE)
        count = self._random.randint(low, most)
        return "".join(self.sequence(items, is_first=False, is_last=False) for _ in range(count))

    def reference(self, argument: int) -> str:
        if argument not in self._groups:
            raise refused("a regular expression with a reference to a group that did not match")
        return self._groups[argument]


_ITEMS: Mapping[Any, Callable[[_RegexMaker, Any], str]] = {
    codes.LITERAL: _RegexMaker.literal,
    codes.NOT_LITERAL: _RegexMaker.not_literal,
    codes.ANY: _RegexMaker.anything,
    codes.IN: _RegexMaker.one_of,
    codes.MAX_REPEAT: _RegexMaker.repeat,
    codes.MIN_REPEAT: _RegexMaker.repeat,
    codes.GROUPREF: _RegexMaker.reference,
}
