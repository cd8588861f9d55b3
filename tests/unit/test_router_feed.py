"""Order, gaps and snapshots of KV feeds."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core import KvBatch, KvCleared, KvRemoved, KvStored, KvTier
from services.router.feed import KvFeed, KvIndex


def make(index: KvIndex | None = None) -> KvFeed:
    return KvFeed(index or KvIndex(), ranks=1, tells_events=True, remembered_blocks_max=100)


def stored(*hashes: int, tier: KvTier = KvTier.DEVICE) -> KvStored:
    return KvStored(block_hashes=hashes, tier=tier)


def snapshot(sequence: int, *events, epoch: int = 1, is_complete: bool = True) -> KvBatch:
    return KvBatch(epoch=epoch, sequence=sequence, events=events, is_snapshot=True, is_complete=is_complete)


def change(sequence: int, *events, epoch: int = 1) -> KvBatch:
    return KvBatch(epoch=epoch, sequence=sequence, events=events)


def test_a_snapshot_in_parts_is_exact_when_complete():
    """Parts add up; before the last one the worker is recovering and cannot be resumed."""
    feed = make()
    assert (feed.trust, feed.resume_at) == ("recovering", None)
    assert feed.apply(snapshot(7, stored(1, 2), is_complete=False))
    assert (feed.trust, feed.resume_at, feed.blocks) == ("recovering", None, 2)
    assert feed.apply(snapshot(7, stored(3)))
    assert (feed.trust, feed.reason, feed.resume_at, feed.blocks) == ("exact", "", (1, 7), 3)
    assert feed.apply(change(8, KvRemoved(block_hashes=(3,))))
    assert feed.blocks == 2


def test_gaps_empty_the_view_and_ask_for_a_snapshot():
    """A lost step, another epoch, or changes before any snapshot: nothing of it is believed."""
    for wrong in (change(9, stored(5)), change(8, stored(5), epoch=2)):
        feed = make()
        feed.apply(snapshot(7, stored(1)))
        assert not feed.apply(wrong)
        assert (feed.blocks, feed.trust, feed.resume_at, feed.gaps) == (0, "recovering", None, 1)
        assert feed.apply(snapshot(9, stored(1, 5)))
        assert (feed.blocks, feed.trust) == (2, "exact")
    assert not make().apply(change(1, stored(5)))


def test_steps_seen_before_change_nothing():
    """A duplicate after a resume is ignored, also when it would undo what came later."""
    feed = make()
    feed.apply(snapshot(1))
    feed.apply(change(2, stored(1)))
    feed.apply(change(3, KvRemoved(block_hashes=(1,))))
    assert feed.apply(change(2, stored(1)))
    assert feed.blocks == 0


def test_tiers_are_apart_and_clear_empties_all():
    """A block that left the device may still be on the host; cleared means gone everywhere."""
    index = KvIndex()
    feed = make(index)
    feed.apply(snapshot(1, stored(1, 2), stored(1, tier=KvTier.HOST)))
    feed.apply(change(2, KvRemoved(block_hashes=(1,))))
    assert (len(index.device), len(index.tier(KvTier.HOST))) == (1, 1)
    feed.apply(change(3, KvCleared()))
    while index.sweep(10):
        pass
    assert (len(index.device), len(index.tier(KvTier.HOST))) == (0, 0)


def test_a_dropped_worker_leaves_the_others_blocks():
    """Bits are given out again without carrying blocks over."""
    index = KvIndex()
    first, second = make(index), make(index)
    first.apply(snapshot(1, stored(1, 2)))
    second.apply(snapshot(1, stored(1, 2, 3)))
    first.drop()
    while index.sweep(10):
        pass
    third = make(index)
    assert (third.blocks, second.blocks, len(index.device)) == (0, 3, 3)


@given(st.lists(st.tuples(st.sampled_from(["pass", "lose", "twice"]), st.integers(1, 9), st.booleans()), max_size=40))
def test_an_exact_feed_equals_the_workers_cache(steps):
    """Whatever is lost or doubled on the way: when the feed says exact, it holds what the worker holds."""
    feed = make()
    feed.apply(snapshot(0))
    cache: set[int] = set()
    for sequence, (fate, block, is_stored) in enumerate(steps, start=1):
        (cache.add if is_stored else cache.discard)(block)
        event = stored(block) if is_stored else KvRemoved(block_hashes=(block,))
        for _ in range({"pass": 1, "lose": 0, "twice": 2}[fate]):
            if not feed.apply(change(sequence, event)):
                feed.apply(snapshot(sequence, *(stored(each) for each in sorted(cache))))
        if fate != "lose":
            assert (feed.trust, feed.blocks) == ("exact", len(cache))
