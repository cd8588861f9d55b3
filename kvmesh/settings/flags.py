"""Parses the command line. Unlike argparse, it reports all problems."""

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvmesh.settings.declare import Spec, specs
from kvmesh.settings.parse import from_text

CONFIG_FLAG = "--config"


class Flags:
    """A parsed command line. `found` maps a setting's path to its flag and the function that makes its value."""

    def __init__(self, known: Sequence[Spec]) -> None:
        self.found: dict[tuple[str, ...], tuple[str, Callable[[Spec], Any]]] = {}
        self.config = ""
        self.problems: list[str] = []
        self._by_flag = {spec.flag: spec for spec in known}
        self._negated = {"--no-" + spec.flag[2:]: spec for spec in known if spec.type is bool}
        self._lists: dict[tuple[str, ...], str] = {}

    def read(self, argv: Sequence[str]) -> None:
        """Parses all words. The last of several equal flags counts, except that lists are joined."""
        rest = list(argv)
        while rest:
            flag, has_value, value = rest.pop(0).partition("=")
            if flag in self._by_flag:
                self._known(self._by_flag[flag], flag=flag, value=value if has_value else None, rest=rest)
            elif flag in self._negated:
                self._no(self._negated[flag], flag, is_bare=not has_value)
            elif flag == CONFIG_FLAG:
                self.config = self._value(flag, value=value if has_value else None, rest=rest) or ""
            else:
                self._unknown(flag, bool(has_value), rest)

    def _known(self, spec: Spec, *, flag: str, value: str | None, rest: list[str]) -> None:
        if spec.type is bool and value is None:
            self.found[spec.path] = (flag, lambda spec: True)
            return
        text = self._value(flag, value=value, rest=rest)
        if text is None:
            return
        if spec.type is tuple:
            text = self._lists[spec.path] = f"{self._lists.get(spec.path, '')},{text}"
        self.found[spec.path] = (flag, partial(from_text, text=text))

    def _no(self, spec: Spec, flag: str, *, is_bare: bool) -> None:
        if not is_bare:
            self.problems.append(f"{flag} takes no value")
        self.found[spec.path] = (flag, lambda spec: False)

    def _value(self, flag: str, value: str | None, rest: list[str]) -> str | None:
        if value is not None:
            return value
        if not rest or _is_flag(rest[0]):
            self.problems.append(f"{flag} needs a value")
            return None
        return rest.pop(0)

    def _unknown(self, flag: str, has_value: bool, rest: list[str]) -> None:
        if not flag.startswith("-"):
            self.problems.append(f"{flag} is no flag; flags begin with --")
            return
        guess = difflib.get_close_matches(flag, [*self._by_flag, *self._negated], n=1)
        self.problems.append(f"{flag} is unknown" + (f"; did you mean {guess[0]}?" if guess else ""))
        # The value of an unknown flag is not another problem.
        if not has_value and rest and not rest[0].startswith("-"):
            rest.pop(0)


def split_operands(cls: type, argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Separates the words that are neither flags of `cls` nor their values. Returns those words, then all others in their order.

    As in `Flags`, the word after an unknown flag is its value.
    """
    without_value = {spec.flag for spec in specs(cls) if spec.type is bool}
    without_value |= {"--no-" + flag[2:] for flag in without_value} | {"--help", "-h"}
    operands: list[str] = []
    others: list[str] = []
    needs_value = False
    for word in argv:
        is_value = needs_value and not _is_flag(word)
        is_operand = not is_value and not word.startswith("-")
        (operands if is_operand else others).append(word)
        needs_value = not is_value and not is_operand and "=" not in word and word not in without_value
    return operands, others


def _is_flag(word: str) -> bool:
    """Returns a word that contains a space is a value: `--engine-args "--seed 1"` passes flags to another process."""
    return word.startswith("--") and " " not in word
