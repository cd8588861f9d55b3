"""Short constructors of JSON Schema."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]
INTEGER_MAX = 2**63 - 1


def text(description: str = "", *, length_max: int | None = None, length_min: int | None = None) -> Schema:
    bounds = {"minLength": length_min, "maxLength": length_max}
    return {"type": "string", **{name: value for name, value in bounds.items() if value is not None}} | (
        {"description": description} if description else {}
    )


def one_of(*allowed: str) -> Schema:
    return {"type": "string", "enum": list(allowed)}


def boolean() -> Schema:
    return {"type": "boolean"}


def integer(low: int = -INTEGER_MAX - 1, high: int = INTEGER_MAX) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def array(items: Schema, *, items_min: int = 0) -> Schema:
    return {"type": "array", "items": items, **({"minItems": items_min} if items_min else {})}


def mapping(values: Schema, *, properties_max: int | None = None) -> Schema:
    """Returns an object with any names."""
    bounds = {} if properties_max is None else {"maxProperties": properties_max}
    return {"type": "object", "additionalProperties": values, **bounds}


def response_object(properties: Mapping[str, Schema], *optional: str) -> Schema:
    """Returns an object of a response: all properties are required except `optional`."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def nullable(schema: Schema) -> Schema:
    """Returns the same, or null. `schema` has a type and no enum."""
    return {**schema, "type": [schema["type"], "null"]}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def constant(value: Any) -> Schema:
    return {"const": value}


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def page(item: Schema) -> Schema:
    """Returns a list object of OpenAI's."""
    return response_object({
        "object": constant("list"), "data": array(item), "first_id": nullable(text()), "last_id": nullable(text()),
        "has_more": boolean(),
    })  # fmt: skip
