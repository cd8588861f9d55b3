"""Translation of vLLM's cache events to the block hashes of the mesh, without vLLM."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvmesh.core import KvCleared, KvEvent, KvRemoved, KvStored, KvTier
from kvmesh.engines.output_buffers import KvEventBuffer
from kvmesh.engines.vllm.events import VllmEvents
from kvmesh.kv.blocks import block_hashes, seed_hash

TOKENS = list(range(100, 164))
NAMES = block_hashes(TOKENS, 16)


@dataclass
class BlockStored:
    block_hashes: list[bytes]
    token_ids: list[int]
    parent_block_hash: bytes | None = None
    block_size: int = 16
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = 0


@dataclass
class BlockRemoved:
    block_hashes: list[bytes]
    medium: str | None = "GPU"
    group_idx: int | None = 0


@dataclass
class AllBlocksCleared:
    nothing: list[int] = field(default_factory=list)


def stored(first: int, count: int, **more: Any) -> BlockStored:
    hashes = [b"h%d" % index for index in range(first, first + count)]
    parent = b"h%d" % (first - 1) if first else None
    return BlockStored(hashes, TOKENS[16 * first : 16 * (first + count)], parent, **more)


def replay(events: list[KvEvent]) -> set[tuple[KvTier, int]]:
    cached: set[tuple[KvTier, int]] = set()
    for event in events:
        if isinstance(event, KvCleared):
            cached.clear()
        else:
            named = {(event.tier, name) for name in event.block_hashes}
            cached = cached | named if isinstance(event, KvStored) else cached - named
    return cached


def test_a_chain_gets_the_hashes_of_its_prompt() -> None:
    """Blocks stored in two events continue one chain. The engine's own hashes do not matter."""
    events = VllmEvents().translate([stored(0, 2), stored(2, 2)])
    assert events == [
        KvStored(block_hashes=NAMES[:2], parent_hash=None),
        KvStored(block_hashes=NAMES[2:], parent_hash=NAMES[1]),
    ]


@pytest.mark.parametrize(
    ("lora", "keys", "adapter", "salt"),
    [
        (None, [["tenant"], None], "", "tenant"),
        ("tuned", [["tuned"], ["tuned"]], "tuned", ""),
        ("tuned", [["tuned", "tenant"], ["tuned"]], "tuned", "tenant"),
        ("same", [["same", "same"], ["same"]], "same", "same"),
        ("tuned\0hash", [["tuned\0hash", "tenant"], ["tuned\0hash"]], "tuned", "tenant"),
    ],
)
def test_adapter_and_salt_seed_the_chain(lora: str | None, keys: list[Any], adapter: str, salt: str) -> None:
    """vLLM publishes both in the extra keys of a block, and the mesh uses them as the seed of the chain."""
    events = VllmEvents().translate([stored(0, 2, lora_name=lora, extra_keys=keys)])
    assert events == [KvStored(block_hashes=block_hashes(TOKENS[:32], 16, seed=seed_hash(adapter, salt)))]


def test_a_duplicate_block_is_removed_with_its_last_copy() -> None:
    """vLLM may store a prefix twice and announces both."""
    translator = VllmEvents()
    first = translator.translate([stored(0, 3)])
    again = translator.translate([stored(0, 4)])
    assert again == [KvStored(block_hashes=[NAMES[3]], parent_hash=NAMES[2])]
    assert translator.translate([BlockRemoved([b"h2"])]) == []
    last = translator.translate([BlockRemoved([b"h2"])])
    assert last == [KvRemoved(block_hashes=[NAMES[2]])]
    assert replay([*first, *again, *last]) == {(KvTier.DEVICE, name) for name in (*NAMES[:2], NAMES[3])}


def test_tiers_are_separate() -> None:
    """A block that leaves the device may stay in host memory, and its children still find their parent."""
    translator = VllmEvents()
    events = translator.translate([stored(0, 2), stored(0, 2, medium="CPU"), BlockRemoved([b"h1"])])
    assert replay(events) == {(KvTier.DEVICE, NAMES[0]), (KvTier.HOST, NAMES[0]), (KvTier.HOST, NAMES[1])}
    assert translator.translate([stored(2, 1)]) == [KvStored(block_hashes=[NAMES[2]], parent_hash=NAMES[1])]


def test_a_clear_removes_all_and_other_groups_are_ignored() -> None:
    """After a clear the same prompt is announced again. The second group of a hybrid model repeats the first."""
    translator = VllmEvents()
    translator.translate([stored(0, 4)])
    assert translator.translate([stored(0, 4, group_idx=1), BlockRemoved([b"h0"], group_idx=1)]) == []
    assert translator.translate([AllBlocksCleared()]) == [KvCleared()]
    assert len(translator) == 0
    assert translator.translate([stored(0, 1)]) == [KvStored(block_hashes=NAMES[:1])]


def test_unknown_blocks_are_ignored() -> None:
    """A block with an unknown parent, or the removal of an unknown block, gives no event."""
    translator = VllmEvents()
    assert translator.translate([stored(2, 1), BlockRemoved([b"h9"])]) == []


def test_a_snapshot_equals_the_replayed_events() -> None:
    """Replaying the snapshot gives the same blocks as replaying all events."""
    translator = VllmEvents()
    events = translator.translate(
        [stored(0, 4), stored(0, 2, medium="CPU"), BlockRemoved([b"h3"]), BlockRemoved([b"h2"])]
    )
    assert replay(translator.snapshot()) == replay(events)
    assert translator.snapshot()[0] == KvCleared()


async def test_a_slow_reader_gets_the_snapshot_that_the_engine_sends_later() -> None:
    """The buffer drops the events between its overflow and the snapshot, which contains them. Later events follow the snapshot."""
    requests = 0

    def request_snapshot() -> None:
        nonlocal requests
        requests += 1

    buffer = KvEventBuffer(4, request_snapshot)
    for number in range(8):
        buffer.put_nowait([KvStored(block_hashes=[number], parent_hash=None)])
    assert requests == 1
    snapshot: list[KvEvent] = [KvCleared(), KvStored(block_hashes=[7], parent_hash=None)]
    later = KvStored(block_hashes=[8], parent_hash=7)
    buffer.replace(list(snapshot))
    buffer.put_nowait([later])
    buffer.close_nowait()
    assert [list(batch) async for batch in buffer.batches()] == [[*snapshot, later]]
