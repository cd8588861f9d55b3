"""Declares settings, and lists all settings of a dataclass."""

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

T = TypeVar("T")
PREFIX = "KVMESH_"
# Units by the last word of a name, as `--help` prints them.
_UNITS = {
    "s": "seconds",
    "ms": "milliseconds",
    "bytes": "bytes",
    "tokens": "tokens",
    "blocks": "blocks",
    "ratio": "0 to 1",
    "percent": "percent",
}


REQUIRED: Any = object()
"""The default of a setting without a default."""


def setting(
    default: T,
    help: str,  # noqa: A002 (the word of the declaration)
    *,
    unit: str = "",
    min: float | None = None,  # noqa: A002
    max: float | None = None,  # noqa: A002
    choices: Sequence[str] = (),
    secret: bool = False,
) -> T:
    """Returns a dataclass field with a default. `unit` defaults to the unit in the name's ending (`_s`, `_bytes`...).

    `min` and `max` are inclusive. A secret is left out of `repr` and masked in `--help`.
    """
    metadata = {"help": help, "unit": unit, "min": min, "max": max, "choices": tuple(choices), "secret": secret}
    if default is REQUIRED:
        return typing.cast(T, dataclasses.field(repr=not secret, metadata=metadata))
    if isinstance(default, dict):
        return typing.cast(T, dataclasses.field(default_factory=default.copy, repr=not secret, metadata=metadata))
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


def internal(default: T, reason: str) -> T:
    """Returns a field without a flag, variable or file key: its value was measured, or no operator would change it.

    Tests pass other values to the dataclass.
    """
    return dataclasses.field(default=default, metadata={"internal": True, "help": reason})


def group(default_factory: Callable[[], T], *, without: Sequence[str] = ()) -> T:
    """Returns a field with the settings of another dataclass. The code sets the fields in `without`, so they have no flags."""
    return dataclasses.field(default_factory=default_factory, metadata={"without": tuple(without)})


def required(help: str, **checks: Any) -> Any:  # noqa: A002
    """Returns a dataclass field without a default. Loading fails unless a source provides it."""
    return setting(REQUIRED, help, **checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One setting: its path, type, default and limits."""

    path: tuple[str, ...]
    type: type
    is_optional: bool
    default: Any
    help: str
    unit: str
    min: float | None
    max: float | None
    choices: tuple[str, ...]
    is_secret: bool
    is_hidden: bool = False

    @property
    def flag(self) -> str:
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + "_".join(self.path).upper()

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def names(self) -> str:
        return f"{self.flag} ({self.variable}, {self.key} in the file)"


def is_group(hint: Any) -> bool:
    """Returns True when a field of this type is a group of settings."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def specs(
    cls: type,
    *,
    path: tuple[str, ...] = (),
    defaults: Any = None,
    hidden: Collection[str] = (),
) -> Iterator[Spec]:
    """All settings of `cls` in declaration order, groups flattened. The values of an instance in `defaults` replace the defaults."""
    hints = typing.get_type_hints(cls)
    for each in dataclasses.fields(cls):
        if not each.init:
            continue
        hint, default = hints[each.name], _default(each, defaults)
        if is_group(hint):
            yield from specs(
                hint,
                path=(*path, each.name),
                defaults=None if default is REQUIRED else default,
                hidden=each.metadata.get("without", ()),
            )
        else:
            spec = _spec(each, hint=hint, default=default, path=(*path, each.name))
            yield dataclasses.replace(spec, is_hidden=each.name in hidden or "internal" in each.metadata)


def _default(each: "dataclasses.Field[Any]", defaults: Any) -> Any:
    if defaults is not None:
        return getattr(defaults, each.name)
    if each.default is not dataclasses.MISSING:
        return each.default
    if each.default_factory is not dataclasses.MISSING:
        return each.default_factory()
    return REQUIRED


def _spec(each: "dataclasses.Field[Any]", *, hint: Any, default: Any, path: tuple[str, ...]) -> Spec:
    metadata: Mapping[str, Any] = each.metadata
    base, is_optional = _base_type(hint, where=".".join(path))
    return Spec(
        path=path,
        type=base,
        is_optional=is_optional,
        default=default,
        help=metadata.get("help", ""),
        unit=metadata.get("unit")
        or next((_UNITS[word] for word in reversed(each.name.split("_")) if word in _UNITS), ""),
        min=metadata.get("min"),
        max=metadata.get("max"),
        choices=tuple(member.value for member in base) if issubclass(base, StrEnum) else metadata.get("choices", ()),
        is_secret=metadata.get("secret", not each.repr),
    )


def _base_type(hint: Any, *, where: str) -> tuple[type, bool]:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        return _base_type(next(each for each in arguments if each is not type(None)), where=where)[0], True
    if typing.get_origin(hint) is tuple and arguments == (str, ...):
        return tuple, False
    if typing.get_origin(hint) is Mapping:
        return dict, False
    if hint in (str, int, float, bool) or (isinstance(hint, type) and issubclass(hint, StrEnum)):
        return hint, False
    raise TypeError(f"{where}: settings cannot have the type {hint}")
