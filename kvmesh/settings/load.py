"""Loads a component's settings from all sources, and reports all problems together."""

import dataclasses
import difflib
import logging
import os
import sys
import tomllib
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvmesh.errors import InvalidRequestError
from kvmesh.settings.declare import PREFIX, REQUIRED, Spec, is_group, specs
from kvmesh.settings.flags import Flags
from kvmesh.settings.parse import from_file, from_text
from kvmesh.settings.show import help_text

S = TypeVar("S")
CONFIG_VARIABLE = PREFIX + "CONFIG"
# Variables of the set-up and of `kvmesh up`, which are not settings.
TOOL_VARIABLES = frozenset(
    PREFIX + word
    for word in ["VENV", "CACHE", "ENGINE_BUILD", "PYTHON", "PARENT_PID", "STATE", "REQUIRE_PARTS", "API_KEY"]
)
# A foreign variable with a higher similarity to a known name counts as a typo. Names that differ in a whole word are below it.
_TYPO_RATIO = 0.88

_logger = logging.getLogger(__name__)
"""Not an event logger: settings are read before logs have a format, so the message contains the data."""


class SettingsError(ValueError):
    """All problems of the settings. Each names its flag, variable or file key."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def load(
    cls: type[S],
    *,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    program: str = "kvmesh",
    description: str = "",
    foreign_variables: Collection[str] = (),
) -> S:
    """Settings from flags, `KVMESH_*` variables, file and defaults, in this order of precedence.

    The sources default to the process's own. `--help` prints help and raises SystemExit(0). Raises SettingsError with every problem.
    Unknown flags and file keys are problems. An unknown `KVMESH_*` variable is a problem only if it looks like a typo, since one
    environment may serve several components. Other unknown variables are logged in one warning, except `foreign_variables`.
    """
    argv = sys.argv[1:] if argv is None else argv
    environ = os.environ if environ is None else environ
    everything = tuple(specs(cls))
    known = tuple(spec for spec in everything if not spec.is_hidden)
    if "--help" in argv or "-h" in argv:
        _print_help(help_text(cls, program=program, description=description))
        raise SystemExit(0)
    problems: list[str] = []
    flags = Flags(known)
    flags.read(argv)
    problems += flags.problems
    variables = _read_variables(known, environ, foreign_variables, problems=problems)
    in_file = _read_file(known, flags.config or environ.get(CONFIG_VARIABLE, ""), problems)
    values: dict[tuple[str, ...], Any] = {spec.path: spec.default for spec in everything if spec.is_hidden}
    for spec in known:
        _choose(spec, (flags.found, variables, in_file), values, problems=problems)
    if problems:
        raise SettingsError(problems)
    settings = _build(cls, values=values, at=(), problems=problems)
    if problems:
        raise SettingsError(problems)
    return typing.cast(S, settings)


def _print_help(text: str) -> None:
    try:
        print(text, flush=True)  # noqa: T201
    except BrokenPipeError:
        # The reader closed the pipe (`--help | head -1`). Python flushes again when the process exits, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load_or_exit(cls: type[S], *, program: str, description: str = "", **sources: Any) -> S:
    """`load` for the top of a process: prints the problems and exits with status 2."""
    try:
        return load(cls, program=program, description=description, **sources)
    except SettingsError as error:
        for problem in error.problems:
            print(f"{program}: {problem}", file=sys.stderr)  # noqa: T201
        print(f"`{program} --help` lists all settings.", file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None


Found = dict[tuple[str, ...], tuple[str, Callable[[Spec], Any]]]


def _choose(spec: Spec, sources: Sequence[Found], values: dict[tuple[str, ...], Any], *, problems: list[str]) -> None:
    # Parses all sources: a wrong value in the file is reported even if a flag overrides it.
    is_found = False
    for found in sources:
        if spec.path not in found:
            continue
        name, parse = found[spec.path]
        try:
            value = parse(spec)
        except ValueError as error:
            problems.append(f"{name} {error}")
        else:
            if not is_found:
                values[spec.path] = value
        is_found = True
    if is_found:
        return
    if spec.default is REQUIRED:
        problems.append(f"{spec.names} is required")
    else:
        values[spec.path] = spec.default


def _read_variables(
    known: Sequence[Spec], environ: Mapping[str, str], foreign: Collection[str], *, problems: list[str]
) -> Found:
    by_variable = {spec.variable: spec for spec in known}
    unknown = sorted(
        name for name in environ
        if name.startswith(PREFIX) and name not in by_variable and name not in foreign
        and name != CONFIG_VARIABLE and name not in TOOL_VARIABLES
    )  # fmt: skip
    ignored = []
    for name in unknown:
        guess = difflib.get_close_matches(name.removeprefix(PREFIX), _bare(by_variable), n=1, cutoff=_TYPO_RATIO)
        if guess:
            problems.append(f"{name} is unknown; did you mean {PREFIX}{guess[0]}?")
        else:
            ignored.append(name)
    if ignored:
        _logger.warning("settings_variables_unknown: %s", " ".join(ignored))
    return {
        spec.path: (name, partial(from_text, text=environ[name]))
        for name, spec in by_variable.items()
        if name in environ
    }


def _bare(variables: Collection[str]) -> list[str]:
    return [name.removeprefix(PREFIX) for name in variables]


def _read_file(known: Sequence[Spec], path: str, problems: list[str]) -> Found:
    if not path:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path}: is not TOML: {error}")
        return {}
    found: Found = {}
    _read_table(tables, at=(), leaves={spec.path for spec in known}, file=path, found=found, problems=problems)
    return found


def _read_table(
    table: Mapping[str, Any],
    *,
    at: tuple[str, ...],
    leaves: set[tuple[str, ...]],
    file: str,
    found: Found,
    problems: list[str],
) -> None:
    for key, value in table.items():
        path = (*at, key)
        name = f"{file}: {'.'.join(path)}"
        if path in leaves:
            found[path] = (name, partial(from_file, value=value))
        elif any(leaf[: len(path)] == path for leaf in leaves):
            if isinstance(value, dict):
                _read_table(value, at=path, leaves=leaves, file=file, found=found, problems=problems)
            else:
                problems.append(f"{name} must be a table")
        else:
            guess = difflib.get_close_matches(".".join(path), [".".join(leaf) for leaf in leaves], n=1)
            problems.append(f"{name} is unknown" + (f"; did you mean {guess[0]}?" if guess else ""))


def _build(cls: type, *, values: Mapping[tuple[str, ...], Any], at: tuple[str, ...], problems: list[str]) -> Any:
    hints = typing.get_type_hints(cls)
    arguments = {
        each.name: _build(hints[each.name], values=values, at=(*at, each.name), problems=problems)
        if is_group(hints[each.name])
        else values[(*at, each.name)]
        for each in dataclasses.fields(cls)
        if each.init
    }
    try:
        return cls(**arguments)
    except (ValueError, InvalidRequestError) as error:
        # The dataclass's own check of combinations of fields.
        problems.append(f"{'.'.join(at) or 'settings'}: {error}")
        return None
