"""google.protobuf.Struct to JSON values and back."""

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from kvmesh.errors import InvalidRequestError

_INTEGER_MAX = 2.0**53
VALUES_MAX = 50_000
"""Values in the Structs of one request together. Converting this many takes about 50 ms; a request of 8 MB has room for 4 million."""


class StructReader:
    """Converts the Structs of one request to JSON values."""

    def __init__(self) -> None:
        self._values = 0

    def read(self, message: Struct, field: str) -> dict[str, Any]:
        """Whole numbers become integers: a Struct has doubles only. protobuf bounds the nesting to 100.

        Raises InvalidRequestError with the field's name for numbers that JSON cannot represent, and for too many values.
        """
        return {key: self._value(value, field) for key, value in message.fields.items()}

    def _value(self, value: Value, field: str) -> Any:
        self._values += 1
        if self._values > VALUES_MAX:
            message = f"{field} and its like may have at most {VALUES_MAX} values"
            raise InvalidRequestError(message, field=field, reason="too_many_values")
        kind = value.WhichOneof("kind")
        if kind == "number_value":
            return _number(value.number_value, field)
        if kind == "struct_value":
            return self.read(value.struct_value, field)
        if kind == "list_value":
            return [self._value(each, field) for each in value.list_value.values]
        return None if kind in (None, "null_value") else getattr(value, kind)


def to_struct(values: Mapping[str, Any], field: str) -> Struct:
    """Raises InvalidRequestError if a value has another type than those of JSON."""
    message = Struct()
    try:
        message.update(values)
    except (ValueError, TypeError, OverflowError):
        raise InvalidRequestError(f"{field} must hold JSON values only", field=field) from None
    return message


def _number(number: float, field: str) -> float:
    if not math.isfinite(number):
        raise InvalidRequestError(f"{field} must hold finite numbers only", field=field)
    return int(number) if number.is_integer() and abs(number) <= _INTEGER_MAX else number
