"""Converts messages to plain values and back, field by field, where both sides have the same names."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Generic, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from kvmesh.rpc.codec.scalars import from_duration, from_timestamp, known_enum, to_duration, to_timestamp

MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")
Convert = Callable[[Any], Any]
_SECONDS: Mapping[str, tuple[Convert, Convert]] = {
    Duration.DESCRIPTOR.full_name: (to_duration, from_duration),
    Timestamp.DESCRIPTOR.full_name: (to_timestamp, from_timestamp),
}


def enum_table(enum: Any, value_type: Callable[[str], ValueT]) -> dict[Any, ValueT]:
    """Returns the plain values of an enum by number, without UNSPECIFIED: `ROLE_PREFILL` becomes `value_type("prefill")`."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return {number: value_type(name.removeprefix(prefix).lower()) for name, number in enum.items() if number}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A field that both sides have. A conversion that is None changes nothing."""

    name: str
    value_name: str
    encode: Convert | None
    decode: Convert | None
    may_be_absent: bool


class MessageCodec(Generic[MessageT, ValueT]):
    """The codec of a message type and a dataclass.

    1. It converts the fields that both have: scalars, and Durations and Timestamps, whose name in the dataclass ends with `_s`. For
       enums and other messages `parts` gives, by name, the table (`enum_table`), the codec, or a pair of functions to encode and
       decode one; without a part they are left out.
    2. An absent field takes the dataclass's default. None is not encoded.
    3. An unknown number of an enum raises InvalidRequestError with the field's name; in a repeated field it is skipped.

    Code that names each field is up to a third faster; the messages of requests have such codecs.
    """

    def __init__(self, message: type[MessageT], value: type[ValueT], **parts: Any) -> None:
        self._message = message
        self._value = value
        has_default = {
            each.name: each.default is not MISSING or each.default_factory is not MISSING
            for each in fields(value)  # type: ignore[arg-type]
        }
        found = (_make_field(each, has_default, parts.get(each.name)) for each in message.DESCRIPTOR.fields)
        self._fields = [each for each in found if each is not None]

    def encode(self, value: ValueT, **others: Any) -> MessageT:
        """`others` are fields of the message that replace those of the value."""
        values = {}
        for each in self._fields:
            field = getattr(value, each.value_name)
            if field is not None:
                values[each.name] = field if each.encode is None else each.encode(field)
        return self._message(**{**values, **others})

    def decode(self, message: MessageT, **others: Any) -> ValueT:
        """`others` are fields of the dataclass that replace those of the message."""
        values = {}
        for each in self._fields:
            if not each.may_be_absent or message.HasField(each.name):
                field = getattr(message, each.name)
                values[each.value_name] = field if each.decode is None else each.decode(field)
        return self._value(**{**values, **others})


def _make_field(descriptor: Any, has_default: Mapping[str, bool], part: Any) -> _Field | None:
    seconds = _SECONDS.get(descriptor.message_type.full_name) if descriptor.message_type is not None else None
    value_name = f"{descriptor.name}_s" if seconds is not None else descriptor.name
    is_scalar = descriptor.message_type is None and descriptor.enum_type is None
    if value_name not in has_default or (part is None and seconds is None and not is_scalar):
        return None
    encode, decode = seconds or _conversions(part, descriptor)
    return _Field(
        name=descriptor.name,
        value_name=value_name,
        encode=encode,
        decode=decode,
        may_be_absent=descriptor.has_presence and has_default[value_name],
    )


def _conversions(part: Any, descriptor: Any) -> tuple[Convert | None, Convert | None]:
    if part is None:
        # A slice is copied by the protobuf library, which is faster than iterating.
        return None, (lambda values: tuple(values[:])) if descriptor.is_repeated else None
    if isinstance(part, Mapping):
        numbers = {value: number for number, value in part.items()}
        if descriptor.is_repeated:
            return _for_each(numbers.__getitem__), lambda found: tuple(part[each] for each in found if each in part)
        return numbers.__getitem__, lambda number: known_enum(number, part, descriptor.name)
    encode, decode = (part.encode, part.decode) if isinstance(part, MessageCodec) else part
    return (_for_each(encode), _for_each(decode)) if descriptor.is_repeated else (encode, decode)


def _for_each(convert: Convert) -> Convert:
    return lambda values: tuple(map(convert, values))
