"""JSON Schema in few words."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

INTEGER_MAX = 2**63 - 1


def text(help: str = "", *, most: int | None = None, least: int | None = None) -> Schema:  # noqa: A002
    """A string of so many characters."""
    bounds = {name: value for name, value in (("minLength", least), ("maxLength", most)) if value is not None}
    return _told({"type": "string", **bounds}, help)


def words(*allowed: str, help: str = "") -> Schema:  # noqa: A002
    """One of some words."""
    return _told({"type": "string", "enum": list(allowed)}, help)


def flag(help: str = "") -> Schema:  # noqa: A002
    """True or false."""
    return _told({"type": "boolean"}, help)


def integer(low: int = -INTEGER_MAX - 1, high: int = INTEGER_MAX, help: str = "") -> Schema:  # noqa: A002
    """A whole number."""
    return _told({"type": "integer", "minimum": low, "maximum": high}, help)


def number(low: float, high: float, help: str = "", *, above: bool = False) -> Schema:  # noqa: A002
    """A number; `above` leaves out the lower bound itself."""
    return _told({"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}, help)


def array(items: Schema, help: str = "", *, least: int = 0, most: int | None = None) -> Schema:  # noqa: A002
    """A list."""
    bounds = {name: value for name, value in (("minItems", least), ("maxItems", most)) if value}
    return _told({"type": "array", "items": items, **bounds}, help)


def mapping(values: Schema, help: str = "", *, most: int | None = None) -> Schema:  # noqa: A002
    """An object with any names."""
    bounds = {} if most is None else {"maxProperties": most}
    return _told({"type": "object", "additionalProperties": values, **bounds}, help)


def anything(help: str = "") -> Schema:  # noqa: A002
    """Any JSON."""
    return _told({}, help)


def asked(properties: Mapping[str, Schema], *needed: str, help: str = "") -> Schema:  # noqa: A002
    """An object of a request: names that are not listed are refused, and null counts as absent where nothing is needed."""
    fields = {name: each if name in needed else nullable(each) for name, each in properties.items()}
    closed: Schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return _told(closed | ({"required": list(needed)} if needed else {}), help)


def told(properties: Mapping[str, Schema], *optional: str, help: str = "") -> Schema:  # noqa: A002
    """An object of an answer: everything is there but what is optional."""
    needed = [name for name in properties if name not in optional]
    return _told({"type": "object", "properties": dict(properties), "required": needed}, help)


def nullable(schema: Schema) -> Schema:
    """The same, or null."""
    kind = schema.get("type")
    if kind == "null":
        return schema
    if isinstance(kind, str) and "enum" not in schema and "const" not in schema:
        return {**schema, "type": [kind, "null"]}
    bare = {name: value for name, value in schema.items() if name != "description"}
    if not bare:
        return schema
    choices = [*bare["anyOf"], {"type": "null"}] if bare.keys() == {"anyOf"} else [bare, {"type": "null"}]
    return _told({"anyOf": choices}, schema.get("description", ""))


def either(*schemas: Schema, help: str = "") -> Schema:  # noqa: A002
    """Any of them."""
    return _told({"anyOf": list(schemas)}, help)


def constant(value: Any) -> Schema:
    """This value only."""
    return {"const": value}


def reference(name: str) -> Schema:
    """A schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def page(item: Schema) -> Schema:
    """A list object of OpenAI's."""
    ends = nullable(text())
    return told({"object": constant("list"), "data": array(item), "first_id": ends, "last_id": ends,
                 "has_more": flag()})  # fmt: skip


def _told(schema: Schema, help: str) -> Schema:  # noqa: A002
    return {**schema, "description": help} if help else schema
