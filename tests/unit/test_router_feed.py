"""Order, gaps and snapshots of KV feeds."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core import KvBatch, KvCleared, KvRemoved, KvStored, KvTier
from services.router.core_settings import IndexSettings
from services.router.index.kv_feed import KvFeed, KvIndex
from tests.index_checks import matches


def make(index: KvIndex | None = None) -> KvFeed:
    return KvFeed(index or KvIndex(IndexSettings()), ranks=1, sends_events=True, cache_blocks_max=100)


def stored(*hashes: int, tier: KvTier = KvTier.DEVICE) -> KvStored:
    return KvStored(block_hashes=hashes, tier=tier)


def snapshot(sequence: int, *events, epoch: int = 1, is_complete: bool = True) -> KvBatch:
    return KvBatch(epoch=epoch, sequence=sequence, events=events, is_snapshot=True, is_complete=is_complete)


def change(sequence: int, *events, epoch: int = 1) -> KvBatch:
    return KvBatch(epoch=epoch, sequence=sequence, events=events)


def part(number: int, sequence: int, *events, is_complete: bool = False) -> KvBatch:
    return KvBatch(epoch=1, sequence=sequence, events=events, is_snapshot=True, is_complete=is_complete, part=number)


def test_a_snapshot_in_parts_is_exact_when_complete():
    """Parts of a snapshot are collected beside the current view. Until the last part the feed is recovering and cannot be resumed."""
    feed = make()
    assert (feed.trust, feed.resume_at) == ("recovering", None)
    assert feed.apply(snapshot(7, stored(1, 2), is_complete=False))
    assert (feed.trust, feed.resume_at, feed.blocks) == ("recovering", None, 0)
    assert feed.apply(snapshot(7, stored(3)))
    assert (feed.trust, feed.reason, feed.resume_at, feed.blocks) == ("exact", "", (1, 7), 3)
    assert feed.apply(change(8, KvRemoved(block_hashes=(3,))))
    assert feed.blocks == 2


def test_changes_are_indexed_lazily_and_snapshots_at_once():
    """Blocks of both count at once, but blocks of a change enter the index only with the next lookup that needs them."""
    index = KvIndex(IndexSettings())
    feed = make(index)
    feed.apply(snapshot(1, stored(*range(1, 21))))
    feed.apply(change(2, stored(*range(101, 121))))
    assert (feed.blocks, len(index.device), len(index.device.holders)) == (40, 40, 20)
    assert [match.depth for match in matches(index.device, range(101, 131))] == [20]
    assert (feed.blocks, len(index.device.holders)) == (40, 40)


def test_parts_of_a_snapshot_are_counted():
    """A duplicate part changes nothing. A missing part interrupts the snapshot, and the previous view remains."""
    feed = make()
    feed.apply(snapshot(3, stored(9)))
    assert feed.apply(part(1, 7, stored(1)))
    assert feed.apply(part(2, 7, stored(2)))
    assert feed.apply(part(2, 7, stored(2)))
    assert (feed.blocks, feed.trust, feed.reason) == (1, "recovering", "snapshot_in_progress")
    assert not feed.apply(part(4, 7, stored(4), is_complete=True))
    assert (feed.blocks, feed.trust, feed.reason, feed.resume_at) == (1, "recovering", "snapshot_interrupted", None)
    assert not feed.apply(part(3, 7, stored(3)))
    for number in (1, 2, 3):
        assert feed.apply(part(number, 8, stored(number), is_complete=number == 3))
    assert (feed.blocks, feed.trust) == (3, "exact")
    assert feed.apply(part(3, 8, stored(3), is_complete=True))
    assert (feed.blocks, feed.trust) == (3, "exact")


def test_a_feed_resumes_at_a_gap():
    """The view before the gap stays in use while the worker sends the missing changes. Then the feed is exact again."""
    feed = make()
    feed.apply(snapshot(7, stored(1)))
    assert not feed.apply(change(9, stored(5)))
    assert (feed.blocks, feed.trust, feed.reason, feed.resume_at) == (1, "recovering", "sequence_gap", (1, 7))
    assert feed.apply(change(8, stored(4)))
    assert feed.trust == "recovering"
    assert feed.apply(change(9, stored(5)))
    assert (feed.blocks, feed.trust, feed.reason, feed.gaps) == (3, "exact", "", 1)


def test_a_new_epoch_needs_a_snapshot():
    """Changes of another epoch, or before any snapshot, are ignored until a snapshot arrives."""
    feed = make()
    feed.apply(snapshot(7, stored(1)))
    assert not feed.apply(change(8, stored(5), epoch=2))
    assert (feed.blocks, feed.trust, feed.reason, feed.resume_at) == (0, "recovering", "epoch_changed", None)
    assert feed.apply(snapshot(9, stored(1, 5), epoch=2))
    assert (feed.blocks, feed.trust) == (2, "exact")
    assert feed.apply(snapshot(1, stored(8), epoch=3, is_complete=False))
    assert feed.blocks == 0
    assert not make().apply(change(1, stored(5)))


def test_predictions_survive_a_snapshot_and_end_with_the_event():
    """Predicted blocks of a request that waits in the worker's queue survive a new snapshot, and end when the worker reports the blocks."""
    index = KvIndex(IndexSettings())
    feed = make(index)
    feed.apply(snapshot(1))
    feed.on_placed(0, [1, 2, 3], now=0.0, is_computing=True)
    feed.on_placed(0, [7, 8], now=0.0, is_computing=False)
    feed.apply(snapshot(2, stored(9)))
    assert [(m.depth, m.holders) for m in matches(index.predicted, [1, 2, 3, 4])] == [(3, 1 << feed.bits[0])]
    assert not matches(index.predicted, [7, 8])
    feed.apply(change(3, stored(1, 2)))
    assert matches(index.predicted, [1, 2, 3])
    feed.apply(change(4, KvStored(block_hashes=(3,), parent_hash=2)))
    assert not matches(index.predicted, [1, 2, 3])
    feed.on_placed(0, [1, 2, 3], now=0.0, is_computing=True)
    assert not len(index.predicted), "blocks that the worker has reported are not predicted"
    feed.on_placed(0, [1, 5], now=0.0, is_computing=True)
    index.expire(10.0)
    assert not matches(index.predicted, [1, 5])


def test_an_engine_without_events_is_approximated():
    """Placed blocks approximate the cache until they expire. There are never more than the cache holds, and the oldest are dropped first."""
    index = KvIndex(IndexSettings())
    feed = KvFeed(index, ranks=1, sends_events=False, cache_blocks_max=4)
    feed.on_placed(0, [1, 2], now=0.0, is_computing=False)
    feed.on_placed(0, [1, 3], now=1.0, is_computing=True)
    assert (feed.trust, feed.reason, feed.blocks) == ("approximate", "no_kv_events", 3)
    feed.on_placed(0, [1, 2], now=2.0, is_computing=True)
    feed.on_placed(0, [4, 5], now=3.0, is_computing=True)
    assert feed.blocks == 4
    assert not matches(index.predicted, [1, 3])[0].depth > 1
    feed.on_settled(0, 5)
    assert feed.blocks == 4
    index.expire(122.5)
    assert feed.blocks == 2
    feed.on_placed(0, list(range(10, 30)), now=123.0, is_computing=True)
    assert feed.blocks == 4


def test_duplicate_changes_are_ignored():
    """A duplicate after a resume does not undo later changes."""
    feed = make()
    feed.apply(snapshot(1))
    feed.apply(change(2, stored(1)))
    feed.apply(change(3, KvRemoved(block_hashes=(1,))))
    assert feed.apply(change(2, stored(1)))
    assert feed.blocks == 0


def test_tiers_are_separate_and_a_clear_empties_all():
    """A block that left the device can still be in host memory. KvCleared removes the blocks of all tiers."""
    index = KvIndex(IndexSettings())
    feed = make(index)
    feed.apply(snapshot(1, stored(1, 2), stored(1, tier=KvTier.HOST)))
    feed.apply(change(2, KvRemoved(block_hashes=(1,))))
    assert (len(index.device), len(index.tiers[KvTier.HOST])) == (1, 1)
    feed.apply(change(3, KvCleared()))
    while index.sweep(10):
        pass
    assert (len(index.device), len(index.tiers[KvTier.HOST])) == (0, 0)


def test_dropping_a_worker_keeps_the_blocks_of_others():
    """A worker that reuses the bits of a dropped worker does not inherit its blocks."""
    index = KvIndex(IndexSettings())
    first, second = make(index), make(index)
    first.apply(snapshot(1, stored(1, 2)))
    second.apply(snapshot(1, stored(1, 2, 3)))
    first.drop()
    while index.sweep(10):
        pass
    third = make(index)
    assert (third.blocks, second.blocks, len(index.device)) == (0, 3, 3)


@given(st.lists(st.tuples(st.sampled_from(["pass", "lose", "twice"]), st.integers(1, 9), st.booleans()), max_size=40))
def test_an_exact_feed_matches_the_workers_cache(steps):
    """With lost and duplicate changes, a feed that claims to be exact has as many blocks as the worker's cache."""
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


def test_a_dropped_feed_changes_nothing():
    """The task that reads a removed worker's events may end later, when its bits already belong to another worker."""
    index = KvIndex(IndexSettings())
    left = make(index)
    left.apply(snapshot(1, stored(1, 2)))
    left.drop()
    while index.sweep(100):
        pass
    other = make(index)
    other.apply(snapshot(1, stored(7)))
    assert other.bits == left.bits
    assert not left.apply(change(2, stored(3)))
    assert not left.apply(snapshot(1, stored(4), epoch=2))
    left.drop()
    assert (other.blocks, list(index.device.holders)) == (1, [7])
