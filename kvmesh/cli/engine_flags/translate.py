"""Finds the counterpart of each flag in another engine's server."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvmesh.cli.engine_flags.command_line import GivenFlag
from kvmesh.cli.engine_flags.table import TITLES, EngineFlag


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
    """The counterpart of one flag."""
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
