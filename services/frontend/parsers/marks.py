"""Finds fixed strings in text that comes in pieces."""

import re
from collections.abc import Iterable
from functools import lru_cache

START_CHARACTERS = 3
"""Enough characters to distinguish marks that begin with a letter from most words."""


def _start(characters: str) -> str:
    """Returns a pattern for the characters that also matches if the text ends after some of them."""
    first, rest = re.escape(characters[0]), characters[1:]
    return f"{first}(?:{_start(rest)}|\\Z)" if rest else first


def clash(marks: Iterable[str], others: Iterable[str]) -> bool:
    """Returns whether a mark of one group begins one of the other group."""
    others = tuple(others)
    return any(a != b and (a.startswith(b) or b.startswith(a)) for a in marks for b in others)


class Marks:
    """A set of marks of which none begins another. `starts` matches where a mark may begin, by its first characters: a cheap
    test that most text fails.
    """

    __slots__ = ("_longest", "_marks", "_pattern", "_with", "starts")

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = tuple(dict.fromkeys(marks))
        for mark in self._marks:
            others = (each for each in self._marks if each != mark)
            if not mark or any(each.startswith(mark) for each in others):
                raise ValueError(f"the mark {mark!r} is empty or begins another one")
        self._longest = max(map(len, self._marks), default=0)
        # Without marks: a pattern that matches nowhere.
        self._pattern = re.compile("|".join(map(re.escape, self._marks)) or r"(?!)")
        starts = dict.fromkeys(_start(mark[:START_CHARACTERS]) for mark in self._marks)
        self.starts = re.compile("|".join(starts) or r"(?!)")
        self._with: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {}

    def combined_with(self, characters: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Returns a pattern that matches a mark or one of the characters, and one that also matches where a mark may begin.

        `characters`: a regular expression of one character. A mark takes precedence.
        """
        found = self._with.get(characters)
        if found is None:
            whole, starts = (re.compile(f"{each.pattern}|{characters}") for each in (self._pattern, self.starts))
            found = self._with[characters] = (whole, starts)
        return found

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """Returns the position of the first mark, and the mark; None if there is none."""
        found = self._pattern.search(text, start)
        return (found.start(), found.group()) if found is not None else None

    def is_at(self, text: str, at: int) -> bool:
        """Returns whether a mark begins at this position."""
        return self._pattern.match(text, at) is not None

    def removed(self, text: str) -> str:
        """Returns the text without its marks."""
        return self._pattern.sub("", text)

    def held(self, text: str, start: int) -> int:
        """Returns where the end of `text[start:]` begins that may become a mark with more text; the text's length if none may."""
        # Searches twice the longest mark to skip whole marks, since the end of one, such as "```", could begin another.
        at = max(start, len(text) - 2 * self._longest + 1)
        while (found := self.starts.search(text, at)) is not None:
            whole = self._pattern.match(text, found.start())
            if whole is not None:
                at = whole.end()
                continue
            tail = text[found.start() :]
            if any(len(mark) > len(tail) and mark.startswith(tail) for mark in self._marks):
                return found.start()
            at = found.start() + 1
        return len(text)


@lru_cache(maxsize=64)
def marks_of(marks: frozenset[str]) -> Marks:
    """Returns the set of these marks, compiled once."""
    return Marks(sorted(marks))


NO_MARKS = Marks(())
