"""Which of vLLM's KV cache groups count, tested with vLLM's own event classes."""

from typing import Any

import pytest

from kvmesh.core import KvRemoved, KvStored, KvTier
from kvmesh.engines.vllm.events import VllmEvents, prefix_group
from kvmesh.kv.blocks import block_hashes

kv_events = pytest.importorskip("vllm.distributed.kv_events", reason="the events' classes are vLLM's")

TOKENS = list(range(100, 164))
NAMES = block_hashes(TOKENS, 16)


def stored(first: int, count: int, **more: Any) -> Any:
    fields = {
        "block_hashes": list(range(first + 1, first + count + 1)),
        "parent_block_hash": first or None,
        "token_ids": TOKENS[16 * first : 16 * (first + count)],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return kv_events.BlockStored(**(fields | more))


def removed(*hashes: int, **more: Any) -> Any:
    return kv_events.BlockRemoved(**({"block_hashes": list(hashes), "medium": "GPU"} | more))


def test_all_kinds_of_vllm_are_known() -> None:
    """Every kind of FULL_PREFIX_KINDS is one of vLLM's, and the remaining kinds do not keep a whole prefix."""
    from vllm.v1.kv_cache_interface import KVCacheSpecKind

    from kvmesh.engines.vllm.events import FULL_PREFIX_KINDS

    assert {kind.value for kind in KVCacheSpecKind} - FULL_PREFIX_KINDS == {
        "sliding_window",
        "sliding_window_mla",
        "mamba",
        "chunked_local_attention",
        "encoder_only_attention",
        "cross_attention",
        "unknown",
    }


@pytest.mark.parametrize(
    ("kinds", "group"),
    [
        (["full_attention"], 0),
        (["sliding_window", "full_attention", "sliding_window"], 1),
        (["mamba", "mamba", "mla_attention"], 2),
        (["sliding_window", "chunked_local_attention"], 0),
        ([], 0),
    ],
)
def test_the_first_group_that_keeps_the_whole_prefix_counts(kinds: list[str], group: int) -> None:
    """Group 0 may drop the blocks outside its window."""
    assert prefix_group(kinds) == group


def test_a_window_that_moves_on_does_not_shorten_the_prefix() -> None:
    """A hybrid model reports both groups. Blocks that leave the window are still cached for full attention."""
    translator = VllmEvents(prefix_group(["sliding_window", "full_attention"]))
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 16}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    events = translator.translate([stored(0, 4, **window), stored(0, 4, **full), removed(1, 2, 3, group_idx=0)])
    assert events == [KvStored(block_hashes=NAMES, parent_hash=None)]
    assert translator.translate([removed(4, group_idx=1)]) == [KvRemoved(block_hashes=[NAMES[3]])]
    assert len(translator) == 3


def test_offloaded_blocks_without_tokens_keep_their_hash() -> None:
    """vLLM's offloading reports some blocks by hash alone. Known ones are stored in their tier, and others are ignored."""
    translator = VllmEvents()
    translator.translate([stored(0, 2)])
    bare = stored(0, 2, token_ids=[], block_size=0, medium="CPU", parent_block_hash=None)
    assert translator.translate([bare]) == [
        KvStored(block_hashes=[NAMES[0]], tier=KvTier.HOST),
        KvStored(block_hashes=[NAMES[1]], parent_hash=NAMES[0], tier=KvTier.HOST),
    ]
    assert translator.translate([stored(2, 1, token_ids=[], block_size=0, medium="CPU")]) == []
    assert translator.translate([removed(1, medium="CPU")]) == [KvRemoved(block_hashes=[NAMES[0]], tier=KvTier.HOST)]


def test_remote_media_are_separate_tiers() -> None:
    """The memory of another worker and an object store are slower than the worker's own memory."""
    translator = VllmEvents()
    events = translator.translate(
        [stored(0, 1, medium="CPU", locality="REMOTE"), stored(0, 1, medium="STORAGE", locality="REMOTE")]
    )
    assert [event.tier for event in events] == [KvTier.PEER, KvTier.OBJECT]
    assert translator.translate([removed(1, medium="CPU", locality="REMOTE")]) == [
        KvRemoved(block_hashes=[NAMES[0]], tier=KvTier.PEER)
    ]
