"""Generates invalid messages: random bytes, valid messages with some bytes changed, and fields with odd values."""

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

WORDS = [
    "", "a", "tiny", "absent", "text", "x" * 3000, "é\u0000\u202e🙂", "stream", "max_tokens", "temperature", "[]", "{}", "null",
    '{"a": 1}', '{"max_tokens": "3", "n": 2}', "BYTES", "BOOL", "INT32", "FP32", "text_input", "sampling_parameters", "1",
    "get_weather", "user", "file-" + "0" * 32, "batch_1", "(", "(a+)+$", "logprobs", "text_output", "timeout", "sequence_id",
    '{"model": "tiny", "prompt": "x", "max_tokens": 2}', '{"$defs": 5}', '{"type": "object", "$ref": "#/x"}', "\ud7ff",
]  # fmt: skip
BYTES = [
    b"",
    b"a",
    b"\x00" * 16,
    b"\xff" * 7,
    b"\x05\x00\x00\x00Hello",
    b"\xff\xff\xff\xff",
    b"\x01",
    b"\x02\x00\x00\x00",
    bytes(300),
]
WHOLE = [0, 1, 2, 3, 7, 16, 401, 402, 2**31 - 1, -1, -2, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1, 86_400]
REAL = [0.0, 1.0, -1.0, 0.5, 1e-30, 2.0, 1e30, float("inf"), float("-inf"), float("nan")]
# (lowest, highest) of whole numbers by type.
_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 2, 5, 20, 200, 2000)))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Returns a valid message with a few bytes changed, deleted, inserted or duplicated."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at : at + rng.randint(1, 8)]
        elif kind == 2:
            found[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            found[at:at] = found[at : at + rng.randint(1, 40)]
    return bytes(found)


def filled(rng: random.Random, message: Message, depth: int = 0) -> Message:
    """Sets some fields of the message to odd values."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < (0.35 if depth else 0.5):
            _set(rng, message, field, depth)
    return message


def _set(rng: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    kind = field.message_type
    if kind is not None and depth > 4:
        return
    if kind is not None and kind.GetOptions().map_entry:
        _set_entry(rng, getattr(message, field.name), kind, depth)
    elif field.is_repeated:
        values = getattr(message, field.name)
        for _ in range(rng.choice((0, 1, 1, 2, 3, 20))):
            if kind is None:
                values.append(_value(rng, field))
            else:
                filled(rng, values.add(), depth + 1)
    elif kind is not None:
        getattr(message, field.name).SetInParent()
        filled(rng, getattr(message, field.name), depth + 1)
    else:
        setattr(message, field.name, _value(rng, field))


def _set_entry(rng: random.Random, entries: Any, kind: Any, depth: int) -> None:
    value = kind.fields_by_name["value"]
    for _ in range(rng.choice((0, 1, 2, 5))):
        key = rng.choice(WORDS)
        if value.message_type is None:
            entries[key] = _value(rng, value)
        else:
            entries[key].CopyFrom(filled(rng, GetMessageClass(value.message_type)(), depth + 1))


def _value(rng: random.Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(BYTES if field.type == FieldDescriptor.TYPE_BYTES else WORDS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(REAL)
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice([*field.enum_type.values_by_number, 99, -1])
        case kind:
            low, high = _LIMITS[kind]
            return rng.choice([each for each in WHOLE if low <= each <= high])
