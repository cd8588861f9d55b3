"""Which fields a reader takes, found by asking it: the description cannot miss a field that is read."""

from collections.abc import Callable, Iterable, KeysView, Mapping
from typing import Any

from kvmesh.errors import MeshError, UnsupportedError
from services.frontend.api.openapi.shapes import Schema, anything

Read = Callable[[Mapping[str, Any]], object]


class _Names(KeysView[str]):
    """Has whatever it is asked for, so that a reader looks at each of the fields."""

    def isdisjoint(self, other: Iterable[Any]) -> bool:
        """Never."""
        return False


class _Recorded(dict[str, Any]):
    """A body that remembers what was looked at."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.seen: dict[str, None] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """The value; the name is remembered."""
        self.seen[key] = None
        return super().get(key, default)

    def keys(self) -> _Names:  # type: ignore[override]  # Readers only ask it what a body lacks.
        """Its names."""
        return _Names(self)


def names_read(read: Read, smallest: Mapping[str, Any]) -> list[str]:
    """The names that a reader looks at. `smallest` is a body that it accepts."""
    body = _Recorded(smallest)
    read(body)
    return list(body.seen)


def refusals(read: Read, smallest: Mapping[str, Any], names: list[str]) -> dict[str, str]:
    """Which of the names are refused whatever they hold, and in which words."""
    found: dict[str, str] = {}
    for name in names:
        try:
            read({**smallest, name: _SOMETHING})
        except UnsupportedError as error:
            if error.field == name:
                found[name] = error.message
        except MeshError:
            continue
    return found


_SOMETHING = {"\x00": "\x00"}
"""No field means this; what is refused is refused before it is looked into."""


def with_untyped(properties: Mapping[str, Schema], read: Read, smallest: Mapping[str, Any]) -> dict[str, Schema]:
    """The typed properties, and the reader's other fields: those that are refused say why, the rest hold anything."""
    names = names_read(read, smallest)
    if missing := properties.keys() - names:
        raise AssertionError(f"the description has fields that nobody reads: {sorted(missing)}")
    others = [name for name in names if name not in properties]
    why = refusals(read, smallest, others)
    untyped = {
        name: anything(f"Refused: {why[name]}." if name in why else "Accepted; changes nothing.") for name in others
    }
    return {**properties, **untyped}
