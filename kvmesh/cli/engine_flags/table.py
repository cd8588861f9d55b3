"""Loads the table of flags. `flags.toml` describes its fields."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

TITLES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
"""Engines of the table, with their names in text."""
KINDS = ("value", "list", "switch")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlag:
    """How one engine sets a subject. `flag`, `off` and `config` empty: it cannot, and `none` says what to do instead."""

    flag: Sequence[str] = ()
    off: Sequence[str] = ()
    config: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    near: str = ""
    none: str = ""

    @property
    def exists(self) -> bool:
        return bool(self.flag or self.off or self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFlag:
    """How kvmesh sets a subject: at most one of the flags, `passes` for the engine's own argument, or `none`."""

    up: str = ""
    engine: str = ""
    worker: str = ""
    frontend: str = ""
    passes: bool = False
    near: str = ""
    none: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One row of the table: what is set, and how each engine sets it."""

    meaning: str
    group: str
    kind: str
    engines: Mapping[str, EngineFlag]
    mesh: MeshFlag


@cache
def load_table() -> Sequence[Subject]:
    """Returns all subjects, in the file's order. Raises ValueError for an entry that breaks the rules in the file."""
    data = tomllib.loads((Path(__file__).parent / "flags.toml").read_text())
    return tuple(map(_subject, data["flag"]))


def find_subject(engine: str, name: str) -> tuple[Subject, bool] | None:
    """Returns the subject that a flag of the engine sets, and False if the flag turns it off."""
    return _names(engine).get(name)


@cache
def _names(engine: str) -> Mapping[str, tuple[Subject, bool]]:
    names = {}
    for subject in load_table():
        names.update(dict.fromkeys(subject.engines[engine].flag, (subject, True)))
        names.update(dict.fromkeys(subject.engines[engine].off, (subject, False)))
    return names


def _subject(entry: Mapping[str, Any]) -> Subject:
    mesh = dict(entry["kvmesh"])
    subject = Subject(
        meaning=entry["meaning"],
        group=entry["group"],
        kind=entry.get("kind", "value"),
        engines={engine: EngineFlag(**entry[engine]) for engine in TITLES},
        mesh=MeshFlag(passes=mesh.pop("pass", False), **mesh),
    )
    _check(subject)
    return subject


def _check(subject: Subject) -> None:
    if subject.kind not in KINDS:
        raise ValueError(f"{subject.meaning}: the kind {subject.kind} is unknown")
    for engine, flag in subject.engines.items():
        if flag.exists == bool(flag.none):
            raise ValueError(f"{subject.meaning}: {engine} needs either a flag or `none`")
    mesh = subject.mesh
    ways = [mesh.up, mesh.engine, mesh.worker, mesh.frontend, mesh.none, "pass" if mesh.passes else ""]
    if len([way for way in ways if way]) != 1:
        raise ValueError(f"{subject.meaning}: kvmesh needs exactly one way")
