"""Translation of TensorRT-LLM's KV events to the block hashes of the mesh."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvmesh.core import KvCleared, KvRemoved, KvStored, KvTier
from kvmesh.engines.trtllm.events import SeedClaims, TrtllmEvents
from kvmesh.engines.trtllm.feeds import decode_frames, rank_endpoint
from kvmesh.kv.blocks import block_hashes, seed_hash

SIZE = 4
TOKENS = list(range(12))
NAMES = block_hashes(TOKENS, SIZE)


def blocks(tokens: Sequence[int], first: int = 100, level: int = 0) -> list[dict[str, Any]]:
    parts = [tokens[i : i + SIZE] for i in range(0, len(tokens), SIZE)]
    return [
        {"block_hash": first + i, "tokens": [{"token_id": each} for each in part], "cache_level": level}
        for i, part in enumerate(parts)
    ]


def event(data: dict[str, Any], number: int | None = None, rank: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"data": data}
    return (
        found | ({} if number is None else {"event_id": number}) | ({} if rank is None else {"attention_dp_rank": rank})
    )


def stored(tokens: Sequence[int], parent: int | None = None, first: int = 100) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": blocks(tokens, first)}


@pytest.fixture
def claims() -> SeedClaims:
    return SeedClaims(SIZE)


@pytest.fixture
def events(claims: SeedClaims) -> TrtllmEvents:
    claims.begin(TOKENS, 0)
    return TrtllmEvents(SIZE, claims)


def names(found: Sequence[Any]) -> list[int]:
    return [name for each in found for name in each.block_hashes]


def test_stored_blocks_get_the_hashes_of_the_mesh(events: TrtllmEvents) -> None:
    """This includes blocks whose parent was stored in an earlier event."""
    first = events.translate(event(stored(TOKENS[:8])))
    later = events.translate(event(stored(TOKENS[8:], parent=101, first=102)))
    assert names(first) + names(later) == NAMES
    assert isinstance(later[0], KvStored) and later[0].parent_hash == NAMES[1]


def test_trailing_partial_blocks_are_dropped(events: TrtllmEvents) -> None:
    """The engine also announces the block that a request is still filling."""
    assert names(events.translate(event(stored(TOKENS[:10])))) == NAMES[:2]


def test_blocks_are_moved_and_removed(events: TrtllmEvents) -> None:
    """A block that moves to host memory is stored there and removed from the device. A removal applies to its present tier."""
    events.translate(event(stored(TOKENS)))
    change = {"type": "updated", "block_hash": 102, "cache_level": {"old_value": 0, "new_value": 1}}
    moved = events.translate(event(change))
    assert [(type(each), each.tier) for each in moved] == [(KvStored, KvTier.HOST), (KvRemoved, KvTier.DEVICE)]
    (gone,) = events.translate(event({"type": "removed", "block_hashes": [102, 999]}))
    assert isinstance(gone, KvRemoved) and (gone.tier, list(gone.block_hashes)) == (KvTier.HOST, [NAMES[2]])


def test_a_gap_clears_the_rank(events: TrtllmEvents) -> None:
    """The blocks of the lost events are unknown. Other ranks are not affected."""
    events.translate(event(stored(TOKENS), number=1, rank=0))
    events.translate(event(stored(TOKENS, first=200), number=1, rank=1))
    assert events.translate(event({"type": "removed", "block_hashes": [102]}, number=2, rank=0)) != []
    found = events.translate(event({"type": "removed", "block_hashes": [101]}, number=4, rank=0))
    assert found == [KvCleared(data_parallel_rank=0)]
    assert {each.data_parallel_rank for each in events.snapshot() if isinstance(each, KvStored)} == {1}


def test_sequential_tenants_are_distinguished(claims: SeedClaims, events: TrtllmEvents) -> None:
    """A chain belongs to the leg that was active when it was computed, even if that leg has ended."""
    claims.end(TOKENS, 0)
    salted = seed_hash("", "tenant")
    claims.begin(TOKENS, salted)
    assert names(events.translate(event(stored(TOKENS)))) == NAMES
    second = events.translate(event(stored(TOKENS, first=200)))
    assert names(second) == block_hashes(TOKENS, SIZE, seed=salted)


def test_blocks_of_concurrent_tenants_are_not_announced(claims: SeedClaims, events: TrtllmEvents) -> None:
    """A wrong hash would send one tenant's requests to another tenant's blocks."""
    claims.begin(TOKENS, seed_hash("", "tenant"))
    assert events.translate(event(stored(TOKENS))) == []
    assert events.translate(event(stored(TOKENS[4:], parent=100, first=101))) == []


def test_a_chain_without_a_leg_is_not_announced(events: TrtllmEvents) -> None:
    assert events.translate(event(stored([50, 51, 52, 53]))) == []


def test_claims_are_bounded() -> None:
    """The oldest prefixes are dropped."""
    claims = SeedClaims(SIZE, prefixes_max=2)
    for first in range(3):
        claims.begin([first] * SIZE, 7)
    assert claims.assign([0] * SIZE, 1) is None
    assert claims.assign([2] * SIZE, 2) == 7


PUSHED_MAP = {
    "type": "BlockStored",
    "block_hashes": [100, 101],
    "parent_block_hash": None,
    "token_ids": TOKENS[:8],
    "block_size": SIZE,
}
PUSHED_LIST = ["BlockStored", [100, 101], None, TOKENS[:8], SIZE, None, "GPU"]


@pytest.mark.parametrize("pushed", [PUSHED_MAP, PUSHED_LIST], ids=["map", "array"])
def test_pushed_events_are_translated(events: TrtllmEvents, pushed: Any) -> None:
    """They give the same events as pulled ones. A gap in the message numbers clears the rank."""

    def push(number: int, *each: Any) -> list[Any]:
        frames = [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, each, 0])]
        return [found for item in decode_frames(frames, 0) for found in events.translate(item)]

    assert names(push(0, pushed)) == NAMES[:2]
    assert names(push(1, ["BlockRemoved", [101]])) == [NAMES[1]]
    assert push(3) == [KvCleared()]
    assert names(push(4, pushed)) == NAMES[:2]
    assert push(5, ["AllBlocksCleared"]) == [KvCleared()]


@pytest.mark.parametrize(
    "frames", [[b""], [b"", b"\0", b"\xc1"], [b"", b"\0", msgspec.msgpack.encode([0, [["Other"]], 0])]]
)
def test_messages_that_cannot_be_decoded_are_dropped(frames: list[bytes]) -> None:
    assert decode_frames(frames, 0) == []


def test_each_rank_has_a_port() -> None:
    assert [rank_endpoint("tcp://127.0.0.1:5557", rank) for rank in (0, 2)] == [
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5559",
    ]
