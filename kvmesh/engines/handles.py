"""Handles whose payload is JSON with a checksum: which ones an engine can read, and for which prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from kvmesh.core import KvHandle
from kvmesh.errors import KvLostError
from kvmesh.kv.blocks import chain_hash, pack_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleForm:
    """The form of an engine's handles. An engine reads handles of its own form only."""

    format: str
    compatibility_hash: str
    block_size_tokens: int
    kv_bytes_per_block: int = 0

    def check(self, handle: KvHandle) -> None:
        """KvLostError if the handle has another form. The hash covers the block size, too."""
        if handle.format != self.format:
            raise KvLostError(
                f"this engine reads {self.format}, not {handle.format}", reason="kv_format", field="handle"
            )
        if handle.compatibility_hash != self.compatibility_hash:
            raise KvLostError(
                "the handle's KV is incompatible with this engine", reason="kv_incompatible", field="handle"
            )


def prompt_hash(seed: int, token_ids: Sequence[int]) -> str:
    """Identifies the prompt whose KV a handle holds. The seed includes adapter and salt."""
    return f"{chain_hash(seed, pack_tokens(token_ids)):016x}"


def pack_json(values: Mapping[str, Any]) -> bytes:
    """JSON, preceded by its checksum."""
    body = json.dumps(values).encode()
    return b"%016x" % xxh3_64_intdigest(body) + body


def unpack_json(payload: bytes) -> Any:
    """ValueError when `pack_json` did not make the payload."""
    body = payload[16:]
    if int(payload[:16], 16) != xxh3_64_intdigest(body):
        raise ValueError("wrong checksum")
    return json.loads(body)
