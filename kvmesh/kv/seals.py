"""Seals of KV handles. A handle travels through the frontend, so its reader must know that a member of the mesh made it, and for whom.

A seal is a keyed tag (`kvmesh/identity/secret.py`) over the whole handle, the reader, the prompt and the expiry. A reader accepts a handle
that is sealed for it, for the leg that brings it, and for that leg's prompt (adapter and tenant salt included), once.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from struct import Struct

from kvmesh.core import Generation, KvHandle, KvReader
from kvmesh.errors import KvLostError
from kvmesh.identity.secret import TAG_BYTES, MeshSecret
from kvmesh.kv.blocks import pack_tokens

CLOCK_SKEW_S = 300.0
"""Largest tolerated difference between the clocks of two hosts.

The expiry only bounds how long a reader remembers used seals; whether blocks are still held is decided by their owner.
"""
USED_MAX = 1 << 17
"""Handles that a reader remembers, about 150 bytes each; the oldest are forgotten first. Their owner has freed their blocks by then."""
_EXPIRY = Struct(">Q")
_PURPOSE = "kv handle"


@dataclass(frozen=True, slots=True, kw_only=True)
class SealScope:
    """Whom a handle is for: the reader and the digest of its prompt."""

    reader: KvReader
    prompt: bytes

    @classmethod
    def of(cls, reader: KvReader, generation: Generation) -> "SealScope":
        return cls(reader=reader, prompt=prompt_digest(generation))


def prompt_digest(generation: Generation) -> bytes:
    """SHA-256 of everything that determines the KV of a prompt. Unlike for block hashes, no one can find two prompts with the same digest."""
    digest = hashlib.sha256(pack_tokens(generation.token_ids))
    digest.update(pack_tokens(generation.emitted_token_ids))
    media = [(each.content_hash, str(each.position).encode(), str(each.length).encode()) for each in generation.media]
    names = (generation.model.encode(), generation.adapter.encode(), generation.cache_salt.encode())
    for part in (*names, *(part for each in media for part in each)):
        # With lengths, no two lists of parts give the same bytes.
        digest.update(b"%d:%b" % (len(part), part))
    return digest.digest()


class HandleSeals:
    """Seals handles of one worker, and checks those of others. `wall` is the time of day in seconds."""

    def __init__(self, secret: MeshSecret, wall: Callable[[], float]) -> None:
        self._secret = secret
        self._wall = wall
        self._used: OrderedDict[bytes, float] = OrderedDict()
        """Expiry by seal, in the order of use."""

    def seal(self, handle: KvHandle, scope: SealScope) -> KvHandle:
        """Returns the handle with its seal. `worker_id` and `worker_epoch` must be set."""
        expiry = _EXPIRY.pack(round((self._wall() + handle.lease_s) * 1000))
        return replace(handle, seal=expiry + self._secret.tag(_PURPOSE, _parts(handle, scope, expiry)))

    def use(self, handle: KvHandle, scope: SealScope) -> None:
        """Accepts a handle, once. KvLostError when it is not sealed for this scope, has expired, or was used."""
        expiry, tag = handle.seal[: _EXPIRY.size], handle.seal[_EXPIRY.size :]
        is_whole = len(tag) == TAG_BYTES
        if not is_whole or not self._secret.is_tag(tag, _PURPOSE, _parts(handle, scope, expiry)):
            raise _refused("is not sealed for this worker, request and prompt")
        now_s, expires_s = self._wall(), _EXPIRY.unpack(expiry)[0] / 1000 + CLOCK_SKEW_S
        if now_s >= expires_s:
            raise _refused("has expired")
        self._forget(now_s)
        if tag in self._used:
            raise _refused("was used before")
        self._used[tag] = expires_s

    def _forget(self, now_s: float) -> None:
        """Removes expired tags, and the oldest ones beyond `USED_MAX`."""
        while self._used:
            tag, expires_s = next(iter(self._used.items()))
            # The order is that of use, so an expired entry may stay behind one that has not expired.
            if expires_s > now_s and len(self._used) < USED_MAX:
                return
            del self._used[tag]


def _parts(handle: KvHandle, scope: SealScope, expiry: bytes) -> Iterator[bytes]:
    yield from (handle.handle_id.encode(), handle.format.encode(), handle.compatibility_hash.encode(), handle.payload)
    yield from (handle.worker_id.encode(), b"%d" % handle.worker_epoch, b"%d" % handle.tokens)
    yield from (b"%d" % (handle.kv_bytes or 0), pack_tokens(handle.first_token_ids), expiry)
    yield from (scope.reader.worker_id.encode(), scope.reader.leg_id.encode(), scope.prompt)


def _refused(problem: str) -> KvLostError:
    return KvLostError(f"the handle {problem}", reason="kv_seal", field="handle.seal")
