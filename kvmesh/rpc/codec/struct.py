"""google.protobuf.Struct to JSON values and back."""

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.struct_pb2 import ListValue, Struct, Value

from kvmesh.errors import InvalidRequestError

_INTEGER_MAX = 2.0**53


def from_struct(message: Struct, field: str) -> dict[str, Any]:
    """Whole numbers become integers: a Struct has doubles only. protobuf bounds the nesting to 100.

    Raises InvalidRequestError with the field's name for numbers that JSON cannot represent.
    """
    return {key: _value(value, field) for key, value in message.fields.items()}


def to_struct(values: Mapping[str, Any], field: str) -> Struct:
    """Raises InvalidRequestError if a value has another type than those of JSON."""
    message = Struct()
    try:
        message.update(values)
    except (ValueError, TypeError, OverflowError):
        raise InvalidRequestError(f"{field} must hold JSON values only", field=field) from None
    return message


def _value(value: Value, field: str) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        return _number(value.number_value, field)
    if kind == "struct_value":
        return from_struct(value.struct_value, field)
    if kind == "list_value":
        return _list(value.list_value, field)
    return None if kind in (None, "null_value") else getattr(value, kind)


def _list(message: ListValue, field: str) -> list[Any]:
    return [_value(each, field) for each in message.values]


def _number(number: float, field: str) -> float:
    if not math.isfinite(number):
        raise InvalidRequestError(f"{field} must hold finite numbers only", field=field)
    return int(number) if number.is_integer() and abs(number) <= _INTEGER_MAX else number
