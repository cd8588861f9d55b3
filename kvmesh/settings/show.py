"""The text of `--help`."""

import dataclasses
import textwrap
from enum import Enum
from typing import Any

from kvmesh.settings.declare import REQUIRED, Spec, specs

_WIDTH = 110
_INDENT = " " * 6


def help_text(cls: type, *, program: str, description: str = "") -> str:
    """Returns all settings with flag, unit, limits, default and variable."""
    lines = [f"usage: {program} [--config FILE] [--SETTING VALUE]..."]
    if description:
        lines += ["", textwrap.fill(description, _WIDTH)]
    lines += ["", "Strongest first: flags, KVMESH_* variables, the TOML file, defaults.", ""]
    lines += ["  --config FILE", f"{_INDENT}TOML file with settings. Variable KVMESH_CONFIG."]
    for spec in specs(cls):
        if spec.is_hidden:
            continue
        lines += [
            f"  {_flag(spec)}",
            *textwrap.wrap(_about(spec), _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT),
        ]
    return "\n".join(lines)


def _flag(spec: Spec) -> str:
    if spec.type is bool:
        return f"{spec.flag} / --no-{spec.flag[2:]}"
    words = {int: "INTEGER", float: "NUMBER", tuple: "A,B,...", dict: "JSON"}
    return f"{spec.flag} {'|'.join(filter(None, spec.choices)) or words.get(spec.type, 'TEXT')}"


def _about(spec: Spec) -> str:
    parts = [spec.unit] if spec.unit else []
    parts += [f"at least {spec.min:g}"] if spec.min is not None else []
    parts += [f"at most {spec.max:g}"] if spec.max is not None else []
    parts += ["empty: none"] if spec.is_optional else []
    parts += ["required" if spec.default is REQUIRED else f"default {default_text(spec)}"]
    return f"{spec.help} [{'; '.join(parts)}] {spec.variable}".strip()


def default_text(spec: Spec) -> str:
    """Returns the default as `--help` prints it. Secrets are masked."""
    if spec.default is REQUIRED:
        return "required"
    if spec.is_secret:
        return "***" if spec.default else "none"
    value = _plain(spec.default)
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value in (None, "", [], {}) else ",".join(value) if isinstance(value, list) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value
