"""Durations, timestamps, enums and other fields."""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from kvmesh.errors import InvalidRequestError

_NANOS = 1_000_000_000
T = TypeVar("T")


def to_duration(seconds: float) -> Duration:
    """Rounds to nanoseconds."""
    duration = Duration()
    fill_duration(duration, seconds)
    return duration


def fill_duration(duration: Duration, seconds: float) -> None:
    duration.seconds = whole = math.floor(seconds)
    # Rounding may give 10^9, which a Duration forbids.
    duration.nanos = min(_NANOS - 1, round((seconds - whole) * _NANOS))


def to_positive_duration(seconds: float) -> Duration:
    """For fields that must be positive: 0 and less become 1 ns."""
    return to_duration(max(1 / _NANOS, seconds))


def fill_positive_duration(duration: Duration, seconds: float) -> None:
    """See `to_positive_duration`; writes into a message's field."""
    fill_duration(duration, max(1 / _NANOS, seconds))


def from_duration(duration: Duration) -> float:
    return float(duration.seconds + duration.nanos / _NANOS)


def optional_duration(message: Message, name: str) -> float | None:
    """Returns None if the field is absent."""
    return from_duration(getattr(message, name)) if message.HasField(name) else None


def positive_duration(message: Message, name: str, field: str, *, required: bool = False) -> float | None:
    """Returns None if the field is absent. Raises InvalidRequestError if it is required, or not above 0 s."""
    seconds = optional_duration(message, name)
    if seconds is None:
        if required:
            raise InvalidRequestError(f"{field} is required", field=field)
        return None
    if seconds <= 0:
        raise InvalidRequestError(f"{field} must be above 0 s, not {seconds:g} s", field=field)
    return seconds


def to_timestamp(seconds: float) -> Timestamp:
    whole = math.floor(seconds)
    return Timestamp(seconds=whole, nanos=min(_NANOS - 1, round((seconds - whole) * _NANOS)))


def from_timestamp(timestamp: Timestamp) -> float:
    return float(timestamp.seconds + timestamp.nanos / _NANOS)


def known_enum(value: int, table: Mapping[Any, T], field: str) -> T:
    """Returns the plain value of an enum's number. Raises InvalidRequestError for unspecified and unknown numbers."""
    try:
        return table[value]
    except KeyError:
        raise InvalidRequestError(f"{field} has no such value: {value}", field=field) from None


def optional_field(message: Message, name: str) -> Any:
    """Returns None if the field is absent."""
    return getattr(message, name) if message.HasField(name) else None


def packed_ids(ids: Sequence[int]) -> "array[int]":
    """Returns a field of token ids as 32-bit words. A Python integer per id of a long prompt takes a hundred times as long."""
    if not ids:
        return array("I")
    # Imported here because frontends import this module and do not use numpy otherwise.
    import numpy as np

    return array("I", np.asarray(ids, np.uint32).tobytes())


def required_text(value: str, field: str, characters_max: int) -> str:
    """Checks for 1 to `characters_max` printable characters: the text is written to logs."""
    if not 1 <= len(value) <= characters_max:
        raise InvalidRequestError(f"{field} must have 1 to {characters_max} characters, not {len(value)}", field=field)
    if not value.isprintable():
        raise InvalidRequestError(f"{field} must have printable characters only", field=field)
    return value
