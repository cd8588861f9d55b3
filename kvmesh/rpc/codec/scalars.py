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
    """Seconds as a Duration, rounded to nanoseconds."""
    duration = Duration()
    fill_duration(duration, seconds)
    return duration


def fill_duration(duration: Duration, seconds: float) -> None:
    """Writes seconds into a message's field."""
    duration.seconds = whole = math.floor(seconds)
    duration.nanos = min(_NANOS - 1, round((seconds - whole) * _NANOS))


def to_positive_duration(seconds: float) -> Duration:
    """Seconds as a Duration that stays above 0, for fields that must be positive: 0 and less become 1 ns."""
    return to_duration(max(1 / _NANOS, seconds))


def fill_positive_duration(duration: Duration, seconds: float) -> None:
    """The same, written into a message's field."""
    fill_duration(duration, max(1 / _NANOS, seconds))


def from_duration(duration: Duration) -> float:
    """A Duration in seconds."""
    return float(duration.seconds + duration.nanos / _NANOS)


def optional_duration(message: Message, name: str) -> float | None:
    """A Duration field in seconds, or None when absent."""
    return from_duration(getattr(message, name)) if message.HasField(name) else None


def positive_duration(message: Message, name: str, field: str, *, required: bool = False) -> float | None:
    """A Duration above 0 s, or None when absent and not required."""
    seconds = optional_duration(message, name)
    if seconds is None:
        if required:
            raise InvalidRequestError(f"{field} is required", field=field)
        return None
    if seconds <= 0:
        raise InvalidRequestError(f"{field} must be above 0 s, not {seconds:g} s", field=field)
    return seconds


def to_timestamp(seconds: float) -> Timestamp:
    """Seconds since the Unix epoch as a Timestamp."""
    whole = math.floor(seconds)
    return Timestamp(seconds=whole, nanos=min(_NANOS - 1, round((seconds - whole) * _NANOS)))


def from_timestamp(timestamp: Timestamp) -> float:
    """A Timestamp as seconds since the Unix epoch."""
    return float(timestamp.seconds + timestamp.nanos / _NANOS)


def known_enum(value: int, table: Mapping[Any, T], field: str) -> T:
    """The domain value of an enum number; unspecified and unknown numbers are refused with the field's name."""
    try:
        return table[value]
    except KeyError:
        raise InvalidRequestError(f"{field} has no such value: {value}", field=field) from None


def optional_field(message: Message, name: str) -> Any:
    """A scalar with presence, or None when absent."""
    return getattr(message, name) if message.HasField(name) else None


def packed_ids(ids: Sequence[int]) -> "array[int]":
    """A field of token ids as 32-bit words. One Python number for each of a long prompt's would cost a hundred times as much."""
    if not ids:
        return array("I")
    # Here, since frontends import this module, have no other use for numpy and never read token ids by the thousand.
    import numpy as np

    return array("I", np.asarray(ids, np.uint32).tobytes())


def required_text(value: str, field: str, characters_max: int) -> str:
    """A string of 1 to `characters_max` characters, none of them a control character: it goes into logs and names."""
    if not 1 <= len(value) <= characters_max:
        raise InvalidRequestError(f"{field} must have 1 to {characters_max} characters, not {len(value)}", field=field)
    if not value.isprintable():
        raise InvalidRequestError(f"{field} must have printable characters only", field=field)
    return value
