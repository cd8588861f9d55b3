"""What a handle's payload says: where the blocks lie and how to know that they are still the right ones."""

import struct
from dataclasses import dataclass

from kvmesh.core import KvHandle
from kvmesh.engines.simulated.runs import Runs, paired
from kvmesh.errors import KvLostError

FORMAT = "simulated/2"
_HEAD = struct.Struct("<4sIIIQ")
_RUN = struct.Struct("<IIQ")
_MAGIC = b"KVS2"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlePayload:
    """Blocks of one prompt on the engine whose transport has `peer` as metadata.

    `stamps` name the filling of each block, `checksum` is the sum of all blocks' parts. Guards need not travel: the reader
    knows the block hashes of its own prompt.
    """

    peer: bytes
    blocks: Runs
    stamps: Runs
    checksum: int
    cached_tokens: int


def pack(payload: HandlePayload) -> bytes:
    """Header, metadata, then runs: the first block, how many count up from it, and the first one's stamp, which counts up too."""
    runs = [_RUN.pack(block, count, stamp) for block, stamp, count in paired(payload.blocks, payload.stamps)]
    head = _HEAD.pack(_MAGIC, len(payload.peer), len(runs), payload.cached_tokens, payload.checksum)
    return b"".join((head, payload.peer, *runs))


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
        end = _HEAD.size + peer_size
        if magic == _MAGIC and len(data) == end + _RUN.size * count:
            blocks, stamps = _runs(data[end:])
            if len(blocks) == -(-handle.tokens // block_size_tokens):
                return HandlePayload(
                    peer=data[_HEAD.size : end], blocks=blocks, stamps=stamps, checksum=total, cached_tokens=cached
                )
    raise KvLostError("the handle's payload is damaged", reason="kv_payload", field="handle.payload")


def _runs(data: bytes) -> tuple[Runs, Runs]:
    blocks, stamps = Runs(), Runs()
    for block, count, stamp in _RUN.iter_unpack(data):
        blocks.add(range(block, block + count))
        stamps.add(range(stamp, stamp + count))
    return blocks, stamps
