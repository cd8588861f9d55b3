"""Makes the `kvmesh up` command that corresponds to the command line of an engine's server."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvmesh.cli.engine_flags.table import TITLES
from kvmesh.cli.engine_flags.translate import GivenFlag, Translation
from kvmesh.engines.registration import EngineRegistration


@dataclass(slots=True, kw_only=True)
class MeshCommand:
    """Arguments of `kvmesh up`, of its workers and of its frontend, and notes for people: (flag as typed, note)."""

    up: list[str] = field(default_factory=list)
    engine: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    frontend: list[str] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def mesh_command(engine: EngineRegistration[Any], translations: Sequence[Translation]) -> str:
    """Returns the command, as one line for a shell."""
    return _line(engine, _collect(engine, translations))


def mesh_notes(engine: EngineRegistration[Any], translations: Sequence[Translation]) -> Sequence[tuple[str, str]]:
    """Flags that kvmesh does not have, or has with a difference: each as typed, with a note."""
    return _collect(engine, translations).notes


def _line(engine: EngineRegistration[Any], command: MeshCommand) -> str:
    words = ["kvmesh", "up", "--engine", engine.name, *command.up]
    flags = list(command.engine)
    if command.arguments:
        flags += [f"--{engine.name}-engine-arguments", json.dumps(command.arguments)]
    if flags:
        words.append(f"--engine-args={shlex.join(flags)}")
    if command.frontend:
        words.append(f"--frontend-args={shlex.join(command.frontend)}")
    return shlex.join(words)


def _collect(engine: EngineRegistration[Any], translations: Sequence[Translation]) -> MeshCommand:
    command = MeshCommand()
    for translation in translations:
        if translation.given.subject is not None:
            _add(command, engine, translation)
    return command


def _add(command: MeshCommand, engine: EngineRegistration[Any], translation: Translation) -> None:
    given = translation.given
    assert given.subject is not None
    mesh = given.subject.mesh
    if mesh.near:
        command.notes.append((given.text, mesh.near))
    if mesh.none:
        command.notes.append((given.text, mesh.none))
    elif mesh.up:
        command.up += _words(mesh.up, given)
    elif mesh.worker:
        command.engine += _words(mesh.worker, given)
    elif mesh.frontend:
        command.frontend += _words(mesh.frontend, given)
    elif mesh.engine.replace("-", "_") in {each.name for each in fields(engine.settings_type)}:
        command.engine += _words(f"--{engine.name}-{mesh.engine}", given)
    else:
        _pass(command, engine, translation)


def _words(flag: str, given: GivenFlag) -> Sequence[str]:
    if given.subject is not None and given.subject.kind == "switch":
        return (flag if given.is_on else f"--no-{flag[2:]}",)
    return (flag, *given.values)


def _pass(command: MeshCommand, engine: EngineRegistration[Any], translation: Translation) -> None:
    """Adds the engine's own argument to the adapter's setting `engine_arguments`."""
    given = translation.given
    if not translation.words:
        note = translation.note or f"{TITLES[engine.name]}'s default"
        command.notes.append((given.text, note))
        return
    name, *values = translation.words
    assert given.subject is not None
    key = name.removeprefix("--").replace("-", "_")
    if given.subject.kind == "switch":
        is_negated = key.startswith("no_")
        command.arguments[key.removeprefix("no_")] = not is_negated
    else:
        command.arguments[key] = [_typed(each) for each in values] if len(values) != 1 else _typed(values[0])


def _typed(text: str) -> Any:
    """Numbers, booleans and JSON as such; other words as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
