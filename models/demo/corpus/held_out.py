"""Keeps the wordings of the evaluation out of the training text."""

import re
from functools import cache
from pathlib import Path

PROMPTS = Path(__file__).parents[1] / "evaluation" / "prompts.txt"
_SLOT = re.compile(r"\{([^{}]*)\}")
_MARKS = re.compile(r"[^\w\s]+")


def plain(text: str) -> str:
    """Small letters and single spaces, without marks."""
    return " ".join(_MARKS.sub(" ", text.lower()).split())


def prompts() -> list[str]:
    """The first and the last user message of every prompt of the evaluation, with slots in braces, without names of tools."""
    found, named = [], False
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            named = line.strip("[]").split()[1] in ("call", "schema")
        elif " => " in line and not line.startswith("#"):
            asked = line.rpartition(" => ")[0]
            turns = (asked.split(": ", 1)[1] if named else asked).split(" // ")
            found += [turns[0], turns[-1]]
    return found


@cache
def texts_to_repeat() -> frozenset[str]:
    """What the prompts ask to repeat, which the corpus must not ask to repeat in any wording."""
    found, is_repeated = set(), False
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            is_repeated = line.startswith("[repeat ")
        elif is_repeated and " => " in line:
            found.add(plain(line.rpartition(" => ")[2]))
    return frozenset(found)


def _wording(prompt: str) -> str:
    """The expression that a message of the same wording matches: one or two words in each slot."""
    return plain(_SLOT.sub(" slotslot ", prompt)).replace("slotslot", r"\S+(?: \S+)?")


@cache
def _expression() -> re.Pattern[str]:
    return re.compile("|".join(sorted({_wording(prompt) for prompt in prompts()})))


def is_held_out_text(text: str) -> bool:
    """Whether a text to repeat is one of the evaluation's."""
    return plain(text) in texts_to_repeat()


def is_held_out(message: str) -> bool:
    """Whether a user message has a wording of the evaluation."""
    return _expression().fullmatch(plain(message)) is not None
