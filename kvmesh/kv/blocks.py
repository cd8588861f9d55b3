"""Names of KV blocks: a chain of xxh3-64 hashes over block-sized runs of token ids.

    seed   = xxh3_64(adapter || 0x00 || cache_salt)             (0 when both are empty)
    h[-1]  = seed
    h[i]   = xxh3_64(le32(token) ... || (content hash || le64(offset)) of each medium in block i, with the seed h[i-1])

Two prompts share block i exactly when they share all tokens up to its end, the adapter, the tenant salt and the media. Only full
blocks have names. A block takes about 0.07 us (CPython, xxhash package), whatever its size.
"""

import sys
from array import array
from collections.abc import Sequence
from struct import Struct

from xxhash import xxh3_64_intdigest

from kvmesh.core import Media

_LE64 = Struct("<Q")
assert array("I").itemsize == 4, "the token array must be 32 bits wide"


def seed_hash(adapter: str = "", cache_salt: str = "") -> int:
    """Returns the start of the chain for an adapter and a tenant salt."""
    if not adapter and not cache_salt:
        return 0
    return xxh3_64_intdigest(adapter.encode() + b"\0" + cache_salt.encode())


def chain_hash(parent_hash: int, token_bytes: bytes, extra: bytes = b"") -> int:
    """Name of the block with these tokens (little-endian 32-bit ids) that follows `parent_hash`."""
    return xxh3_64_intdigest(token_bytes + extra, parent_hash)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids (each below 2^32) as little-endian 32-bit words."""
    words = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    if sys.byteorder == "big":
        words = array("I", words)
        words.byteswap()
    return words.tobytes()


def unpack_tokens(token_bytes: bytes) -> "array[int]":
    """Returns the inverse of `pack_tokens`. ValueError when the last word is incomplete."""
    words = array("I", token_bytes)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def block_hashes(
    token_ids: Sequence[int],
    block_size_tokens: int,
    *,
    seed: int = 0,
    media: Sequence[Media] = (),
) -> list[int]:
    """Returns the names of all `len(token_ids) // block_size_tokens` full blocks, in order."""
    data = pack_tokens(token_ids)
    size = 4 * block_size_tokens
    bodies = Struct(f"{size}s").iter_unpack(memoryview(data)[: len(data) // size * size])
    parent = seed
    if not media:
        # A long prompt costs a few interpreter steps per block, so this loop has as few as possible.
        digest = xxh3_64_intdigest
        return [parent := digest(body, parent) for (body,) in bodies]
    extras = _media_extras(media, block_size_tokens)
    return [parent := chain_hash(parent, body, extra=extras.get(i, b"")) for i, (body,) in enumerate(bodies)]


def _media_extras(media: Sequence[Media], block_size_tokens: int) -> dict[int, bytes]:
    """For each block the content hashes of the media whose placeholders overlap it."""
    extras: dict[int, bytes] = {}
    for item in media:
        first = item.position // block_size_tokens
        last = (item.position + max(1, item.length) - 1) // block_size_tokens
        for block in range(first, last + 1):
            # Where the block begins within the medium. The placeholders of all its blocks may be equal, but their KV is not.
            offset = max(0, block * block_size_tokens - item.position)
            extras[block] = extras.get(block, b"") + item.content_hash + _LE64.pack(offset)
    return extras
