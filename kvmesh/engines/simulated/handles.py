"""The payload of a handle: the positions of its blocks, and the stamps that show whether they still hold the prompt."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core import KvHandle
from kvmesh.engines.simulated.memory import Numbers, Run, counted_up
from kvmesh.errors import KvLostError

FORMAT = "simulated/2"
_HEAD = struct.Struct("<4sIIIQ")
_RUN = struct.Struct("<IIQ")
_MAGIC = b"KVS2"
_STAMP_END = (1 << 63) - (1 << 32)
"""All stamps are below it, including the last one of the longest run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlePayload:
    """Blocks of one prompt on the engine whose transport has the metadata `peer`.

    `runs` hold block numbers and stamps; `checksum` is the sum over all blocks. Guards are not included, since the reader knows the
    block hashes of its own prompt.
    """

    peer: bytes
    runs: Sequence[Run]
    checksum: int
    cached_tokens: int

    def __len__(self) -> int:
        return sum(count for _, count, _ in self.runs)

    @property
    def blocks(self) -> Numbers:
        return counted_up([(block, count) for block, count, _ in self.runs])

    @property
    def stamps(self) -> Numbers:
        return counted_up([(stamp, count) for _, count, stamp in self.runs])


def pack(payload: HandlePayload) -> bytes:
    """Header, metadata, then runs: first block, count, and the first block's stamp."""
    head = _HEAD.pack(_MAGIC, len(payload.peer), len(payload.runs), payload.cached_tokens, payload.checksum)
    return b"".join((head, payload.peer, *(_RUN.pack(*run) for run in payload.runs)))


def unpack(handle: KvHandle, compatibility_hash: str, block_size_tokens: int) -> HandlePayload:
    """Returns the payload of a handle. KvLostError when this engine can never read it."""
    if handle.format != FORMAT:
        raise KvLostError(f"this engine reads {FORMAT}, not {handle.format}", reason="kv_format", field="handle.format")
    if handle.compatibility_hash != compatibility_hash:
        raise KvLostError(
            "the handle's KV is incompatible with this engine",
            reason="kv_incompatible",
            field="handle.compatibility_hash",
        )
    return read_payload(handle.payload, -(-handle.tokens // block_size_tokens))


def read_payload(data: bytes, blocks: int) -> HandlePayload:
    """Returns a packed payload with this many blocks. Raises KvLostError for other data."""
    if len(data) >= _HEAD.size:
        magic, peer_size, count, cached, total = _HEAD.unpack_from(data)
        end = _HEAD.size + peer_size
        # The length is checked before the runs are read, and the count of blocks before anything is allocated for them.
        if magic == _MAGIC and len(data) == end + _RUN.size * count:
            payload = HandlePayload(
                peer=data[_HEAD.size : end],
                runs=list(_RUN.iter_unpack(memoryview(data)[end:])),
                checksum=total,
                cached_tokens=cached,
            )
            if len(payload) == blocks and all(stamp < _STAMP_END for _, _, stamp in payload.runs):
                return payload
    raise KvLostError("the handle's payload is damaged", reason="kv_payload", field="handle.payload")
