"""Reads the command line of an engine's own server, and finds the counterpart of each flag in another engine's."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvmesh.cli.engine_flags.table import TITLES, EngineFlag, Subject, find_subject

PROGRAMS = {
    "vllm": (("vllm", "serve"), ("python", "-m", "vllm.entrypoints.openai.api_server")),
    "sglang": (("python", "-m", "sglang.launch_server"), ("sglang", "serve")),
    "trtllm": (("trtllm-serve", "serve"), ("trtllm-serve",)),
}
"""Words that start each server, the preferred ones first; they may precede the flags."""
MODEL_FLAGS = {"vllm": "--model", "sglang": "--model-path", "trtllm": "--model"}
"""The flag that stands for the model as the first argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFlag:
    """One flag with its value. `subject` None: the table does not have the flag. `is_on`: False turns a switch off."""

    text: str
    """As typed."""
    subject: Subject | None
    values: Sequence[str] = ()
    is_on: bool = True


def read_command_line(engine: str, words: Sequence[str]) -> list[GivenFlag]:
    """Returns the flags in their order. Unknown flags take the words up to the next flag."""
    rest = _without_program(engine, words)
    given = []
    if rest and not _is_flag(rest[0]):
        found = find_subject(engine, name=MODEL_FLAGS[engine])
        assert found is not None
        given.append(GivenFlag(text=rest[0], subject=found[0], values=(rest[0],)))
        del rest[0]
    while rest:
        given.append(_take(engine, rest))
    return given


def _without_program(engine: str, words: Sequence[str]) -> list[str]:
    rest = list(words)
    if rest and rest[0] == "python3":
        rest[0] = "python"
    for program in PROGRAMS[engine]:
        if tuple(rest[: len(program)]) == program:
            return rest[len(program) :]
    return rest


def _take(engine: str, rest: list[str]) -> GivenFlag:
    """Removes one flag and its values from the front of `rest`."""
    word = rest.pop(0)
    name, has_value, value = word.partition("=")
    found = find_subject(engine, name=_plain_name(engine, name=name))
    values = [value] if has_value else []
    if not has_value:
        count = _values_max(found)
        while rest and len(values) < count and not _is_flag(rest[0]):
            values.append(rest.pop(0))
    return GivenFlag(
        text=" ".join([word, *values]) if not has_value else word,
        subject=found[0] if found is not None else None,
        values=tuple(values),
        is_on=found is None or found[1],
    )


def _values_max(found: tuple[Subject, bool] | None) -> int:
    if found is None or found[0].kind == "list":
        return 1_000
    return 0 if found[0].kind == "switch" else 1


def _plain_name(engine: str, name: str) -> str:
    """Returns the flag's name as in the table. vLLM's server also accepts `_` instead of `-`."""
    return name.replace("_", "-") if engine == "vllm" else name


def _is_flag(word: str) -> bool:
    """Negative numbers are values."""
    if not word.startswith("-"):
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


class Match(StrEnum):
    """How well a flag could be translated."""

    SAME = "same"
    NEAR = "near"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """One flag in the other engine. `words` are its flag and values; `config` are keys and values of a YAML file.

    Both are empty if the other engine's default does the same, or if there is no counterpart. `note` is for people.
    """

    given: GivenFlag
    match: Match
    words: Sequence[str] = ()
    config: Sequence[tuple[str, str]] = ()
    note: str = ""


def translate(given: GivenFlag, *, source: str, target: str) -> Translation:
    """Returns the counterpart of one flag."""
    if given.subject is None:
        return Translation(given=given, match=Match.UNKNOWN, note=f"not in the table of {TITLES[source]}'s flags")
    ours, theirs = given.subject.engines[source], given.subject.engines[target]
    if theirs.none:
        return Translation(given=given, match=Match.NONE, note=theirs.none)
    notes = [f"{TITLES[name]}: {flag.near}" for name, flag in ((source, ours), (target, theirs)) if flag.near]
    values = tuple(_convert(value, ours, theirs) for value in given.values)
    words, config = _spell(given, theirs, values)
    return Translation(
        given=given,
        match=Match.NEAR if notes and source != target else Match.SAME,
        words=words,
        config=config,
        note="; ".join(notes),
    )


def _convert(value: str, ours: EngineFlag, theirs: EngineFlag) -> str:
    common = {word: name for name, word in ours.values.items()}.get(value, value)
    return theirs.values.get(common, common)


def _spell(
    given: GivenFlag, theirs: EngineFlag, values: Sequence[str]
) -> tuple[Sequence[str], Sequence[tuple[str, str]]]:
    """Flag and values, or key and value of the file. Nothing where the other engine's default is the same."""
    assert given.subject is not None
    if given.subject.kind != "switch":
        return ((theirs.flag[0], *values), ()) if theirs.flag else ((), ((theirs.config, " ".join(values)),))
    if theirs.config:
        return (), ((theirs.config, theirs.values.get("on", "true") if given.is_on else "false"),)
    names = theirs.flag if given.is_on else theirs.off
    return tuple(names[:1]), ()
