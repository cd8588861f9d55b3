"""Patterns that stand for many wordings: `[a|b|]` is one of its alternatives, `{name}` is a slot. Brackets may nest."""

import re
from random import Random

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_SPACES = re.compile(r" +")


def wording(rng: Random, *patterns: str) -> str:
    """One wording of one of the patterns, with its slots still open."""
    text = rng.choice(patterns)
    while "[" in text:
        text = _CHOICE.sub(lambda found: rng.choice(found[1].split("|")), text)
    return _SPACES.sub(" ", text).strip()


def fill(text: str, /, **slots: object) -> str:
    """The text with its slots filled. What fills a slot is not read again."""
    return _SLOT.sub(lambda found: str(slots[found[1]]), text)


def say(rng: Random, /, *patterns: str, **slots: object) -> str:
    """One wording, filled."""
    return fill(wording(rng, *patterns), **slots)


def upper_first(text: str) -> str:
    """The text with a capital letter at its start."""
    return text[:1].upper() + text[1:]
