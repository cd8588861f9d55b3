"""What a handle's payload says: where the blocks lie and how to know that they are still the right ones."""

import struct
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.core import KvHandle
from kvmesh.errors import KvLostError

FORMAT = "simulated/1"
_HEAD = struct.Struct("<4sIIIQ")
_MAGIC = b"KVS1"
assert sys.byteorder == "little", "handle payloads are written in the machine's order, which must be little-endian"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlePayload:
    """Blocks of one prompt on the engine whose transport has `peer` as metadata.

    `stamps` name the filling of each block, `checksum` is the sum of all blocks' parts. Guards need not travel: the reader
    knows the block hashes of its own prompt.
    """

    peer: bytes
    blocks: "array[int]"
    stamps: "array[int]"
    checksum: int
    cached_tokens: int


def array_of(kind: str, values: Iterable[int] | bytes) -> "array[int]":
    """An array of 32-bit ("I") or 64-bit ("Q") words; bytes are such words as they lie in memory."""
    return array(kind, values)


def pack(payload: HandlePayload) -> bytes:
    """Header, metadata, 32-bit block numbers, 64-bit stamps."""
    head = _HEAD.pack(_MAGIC, len(payload.peer), len(payload.blocks), payload.cached_tokens, payload.checksum)
    return head + payload.peer + payload.blocks.tobytes() + payload.stamps.tobytes()


def unpack(handle: KvHandle, compatibility_hash: str, block_size_tokens: int) -> HandlePayload:
    """The payload of a handle that can be read here. KvLostError when it never can."""
    if handle.format != FORMAT:
        raise KvLostError(f"this engine reads {FORMAT}, not {handle.format}", reason="kv_format", field="handle.format")
    if handle.compatibility_hash != compatibility_hash:
        raise KvLostError(
            "the handle's KV does not fit this engine", reason="kv_incompatible", field="handle.compatibility_hash"
        )
    data = handle.payload
    if len(data) >= _HEAD.size:
        magic, peer_size, count, cached, total = _HEAD.unpack_from(data)
        if (
            magic == _MAGIC
            and len(data) == _HEAD.size + peer_size + 12 * count
            and count == -(-handle.tokens // block_size_tokens)
        ):
            return _unpack_body(data[_HEAD.size :], peer_size, count, cached, total)
    raise KvLostError("the handle's payload is damaged", reason="kv_payload", field="handle.payload")


def _unpack_body(body: bytes, peer_size: int, count: int, cached: int, total: int) -> HandlePayload:
    middle = peer_size + 4 * count
    return HandlePayload(
        peer=body[:peer_size],
        blocks=array("I", body[peer_size:middle]),
        stamps=array("Q", body[middle:]),
        checksum=total,
        cached_tokens=cached,
    )
