"""What a handle's payload says: where the blocks lie and how to know that they are still the right ones."""

import struct
from dataclasses import dataclass

import numpy as np

from kvmesh.core import KvHandle
from kvmesh.engines.simulated.runs import Numbers, counted_up, neighbours
from kvmesh.errors import KvLostError

FORMAT = "simulated/2"
_HEAD = struct.Struct("<4sIIIQ")
_RUN = np.dtype([("block", "<u4"), ("count", "<u4"), ("stamp", "<u8")])
_MAGIC = b"KVS2"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlePayload:
    """Blocks of one prompt on the engine whose transport has `peer` as metadata.

    `stamps` name the filling of each block, `checksum` is the sum of all blocks' parts. Guards need not travel: the reader
    knows the block hashes of its own prompt.
    """

    peer: bytes
    blocks: Numbers
    stamps: Numbers
    checksum: int
    cached_tokens: int


def pack(payload: HandlePayload) -> bytes:
    """Header, metadata, then runs: the first block, how many count up from it, and the first one's stamp, which counts up too."""
    starts, counts = neighbours(payload.blocks, payload.stamps)
    runs = np.empty(len(starts), _RUN)
    runs["block"], runs["count"], runs["stamp"] = payload.blocks[starts], counts, payload.stamps[starts]
    head = _HEAD.pack(_MAGIC, len(payload.peer), len(runs), payload.cached_tokens, payload.checksum)
    return b"".join((head, payload.peer, runs.tobytes()))


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
        if magic == _MAGIC and len(data) == end + _RUN.itemsize * count:
            runs = np.frombuffer(data, _RUN, offset=end)
            counts = runs["count"].astype(np.int64)
            if counts.sum() == -(-handle.tokens // block_size_tokens):
                return HandlePayload(
                    peer=data[_HEAD.size : end],
                    blocks=counted_up(runs["block"].astype(np.int64), counts),
                    stamps=counted_up(runs["stamp"].astype(np.int64), counts),
                    checksum=total,
                    cached_tokens=cached,
                )
    raise KvLostError("the handle's payload is damaged", reason="kv_payload", field="handle.payload")
