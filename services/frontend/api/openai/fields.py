"""Reads a JSON body field by field; whatever is wrong is refused with the field's name."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from kvmesh.errors import InvalidRequestError, UnsupportedError

INTEGER_MAX = 2**63 - 1
TEXT_CHARACTERS_MAX = 1 << 20


def read_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; also refuses invalid UTF-8, NaN, numbers beyond double and nesting beyond 1 024."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", reason="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object", reason="invalid_json")
    return value


class Refusals:
    """Known fields that are not supported, each with the reason and the values that say nothing."""

    def __init__(self, *rows: tuple[str, str, Sequence[Any]]) -> None:
        self.rows = rows
        self.names = frozenset(field for field, _, _ in rows)


class Fields:
    """One object's fields. Each is asked for once by name; `finish` refuses the ones that nobody asked for.

    A field that is null counts as absent, as OpenAI's clients mean it.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._asked: set[str] = set()
        self._groups: list[frozenset[str]] = []
        """Asked for too."""

    def name(self, field: str) -> str:
        """The field's path."""
        return self._prefix + field

    def has(self, field: str) -> bool:
        """True when it is there and not null."""
        return self._values.get(field) is not None

    def take(self, field: str) -> Any:
        """The value as it is, None when absent."""
        self._asked.add(field)
        return self._values.get(field)

    def text(self, field: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str | None:
        """A string."""
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(field, "a string")
        if len(value) > characters_max:
            raise self.wrong(field, f"a string of at most {characters_max} characters")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def integer(self, field: str, low: int = -INTEGER_MAX - 1, high: int = INTEGER_MAX) -> int | None:
        """A whole number without a fraction; true and false are not numbers."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(field, _integer_words(low, high))
        return value

    def number(self, field: str) -> float | None:
        """A number; its range is checked with the request."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(field, "a number")
        return float(value)

    def objects(self, field: str, length_max: int) -> list[dict[str, Any]]:
        """A list of objects; absent is empty."""
        value = self.take(field)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self.wrong(field, "a list of objects")
        if len(value) > length_max:
            raise self.wrong(field, f"a list of at most {length_max} entries")
        return value

    def object(self, field: str) -> dict[str, Any] | None:
        """An object."""
        value = self.take(field)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(field, "an object")
        return value

    def choice(self, field: str, allowed: Sequence[str]) -> str | None:
        """One of the words."""
        value = self.take(field)
        if value is not None and value not in allowed:
            raise self.wrong(field, "one of " + ", ".join(allowed))
        return None if value is None else str(value)

    def ignore(self, fields: Iterable[str]) -> None:
        """Fields that change nothing here."""
        self._asked.update(fields)

    def refuse(self, field: str, why: str, neutral: Sequence[Any] = ()) -> None:
        """A known field that is not supported, unless it says nothing (null or a neutral value)."""
        value = self.take(field)
        if value is None or any(value == each and type(value) is type(each) for each in neutral):
            return
        raise UnsupportedError(f"{self.name(field)} is not supported: {why}", field=self.name(field))

    def lacks(self, fields: frozenset[str]) -> bool:
        """True when none of these fields is there, not even as null: all of them at the price of one."""
        self._groups.append(fields)
        return self._values.keys().isdisjoint(fields)

    def refuse_all(self, refusals: "Refusals") -> None:
        """The same for a table of fields; most bodies have none of them."""
        if not self.lacks(refusals.names):
            for field, why, neutral in refusals.rows:
                self.refuse(field, why, neutral)

    def finish(self) -> None:
        """Refuses what nobody asked for: ignoring it would silently change what the client wants."""
        unknown = self._values.keys() - self._asked
        if unknown:
            unknown = unknown.difference(*self._groups)
        if unknown:
            name = self.name(min(unknown))[:128]
            raise InvalidRequestError(f"unknown field: {name}", field=name, reason="unknown_field")

    def wrong(self, field: str, wanted: str) -> InvalidRequestError:
        """The error for a value that is not what it must be."""
        name = self.name(field)
        return InvalidRequestError(f"{name} must be {wanted}", field=name, reason="invalid_value")


def _integer_words(low: int, high: int) -> str:
    if low <= -INTEGER_MAX and high >= INTEGER_MAX:
        return "an integer"
    return f"an integer of at least {low}" if high >= INTEGER_MAX else f"an integer from {low} to {high}"
