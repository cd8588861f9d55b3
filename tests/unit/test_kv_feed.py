"""The KV feed gives every subscriber a view that equals the worker's cache."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core import KvBatch, KvCleared, KvEvent, KvRemoved, KvStored, KvTier
from kvmesh.errors import OverloadedError
from kvmesh.worker.kv_feed import EVENT_BLOCKS, KvEventFeed, KvLog

HASHES = st.integers(min_value=1, max_value=12)
EVENTS = st.one_of(
    st.builds(
        KvStored,
        block_hashes=st.lists(HASHES, min_size=1, max_size=4, unique=True),
        parent_hash=st.none() | HASHES,
        tier=st.sampled_from([KvTier.DEVICE, KvTier.HOST]),
        data_parallel_rank=st.integers(0, 1),
    ),
    st.builds(
        KvRemoved,
        block_hashes=st.lists(HASHES, min_size=1, max_size=4, unique=True),
        tier=st.sampled_from([KvTier.DEVICE, KvTier.HOST]),
        data_parallel_rank=st.integers(0, 1),
    ),
    st.builds(KvCleared, data_parallel_rank=st.integers(0, 1)),
)
Block = tuple[int, KvTier, int]


def apply_to_set(blocks: set[Block], events: Sequence[KvEvent]) -> set[Block]:
    """Applies events to a set of (rank, tier, hash), as a reference."""
    for event in events:
        rank = event.data_parallel_rank
        if isinstance(event, KvStored):
            blocks = blocks | {(rank, event.tier, h) for h in event.block_hashes}
        elif isinstance(event, KvRemoved):
            blocks = blocks - {(rank, event.tier, h) for h in event.block_hashes}
        else:
            blocks = {block for block in blocks if block[0] != rank}
    return blocks


@given(
    batches=st.lists(st.lists(EVENTS, min_size=1, max_size=3), max_size=20),
    known=st.integers(0, 20),
    history=st.sampled_from([12, 1000]),
)
def test_a_subscriber_gets_the_workers_cache(batches: list[list[KvEvent]], known: int, history: int) -> None:
    """With a snapshot or by resuming, from any sequence number, within the history or not, the view equals the cache."""
    log = KvLog(epoch=7, history_max=5, history_blocks_max=history)
    at_known: set[Block] = set()
    now: set[Block] = set()
    for number, events in enumerate(batches, start=1):
        now = apply_to_set(now, events)
        log.append(events)
        if number == known:
            at_known = now
    received = list(log.since(7 if known else None, known or None))
    view = set() if received and received[0].is_snapshot else at_known
    for batch in received:
        view = apply_to_set(view, batch.events)
    if known <= len(batches):
        assert view == now
    assert log.blocks_count() == len(now)
    kept = [event for batch in log._history for event in batch.events if not isinstance(event, KvCleared)]
    assert sum(EVENT_BLOCKS + len(event.block_hashes) for event in kept) <= history
    assert all(batch.sequence <= log.sequence for batch in received)


def test_another_epoch_gets_a_snapshot() -> None:
    """A subscriber that knows the state of an earlier process cannot resume."""
    log = KvLog(epoch=2, history_max=5)
    log.append([KvStored(block_hashes=[1, 2, 3])])
    received = list(log.since(1, 1))
    assert received == [
        KvBatch(epoch=2, sequence=1, events=[KvStored(block_hashes=[1, 2, 3])], is_snapshot=True, part=1)
    ]


@pytest.mark.parametrize(("known", "is_snapshot"), [(1, True), (2, True), (3, False), (5, False), (6, True)])
def test_a_gap_in_the_history_is_a_snapshot(known: int, is_snapshot: bool) -> None:
    """The log keeps two of five batches. A subscriber that missed more, or claims a later sequence number, gets a snapshot."""
    log = KvLog(epoch=1, history_max=2)
    for block in range(1, 6):
        log.append([KvStored(block_hashes=[block])])
    received = list(log.since(1, known))
    assert any(batch.is_snapshot for batch in received) == is_snapshot
    blocks = {block for batch in received for event in batch.events for block in event.block_hashes}
    assert blocks == (set(range(1, 6)) if is_snapshot else set(range(known + 1, 6)))


async def test_a_watcher_that_leaves_is_removed() -> None:
    """A watcher that ends frees its buffer, so that buffers of former routers do not accumulate."""
    feed = KvEventFeed(epoch=1, history_max=10, buffer_max=10)
    watch = feed.watch()
    await anext(watch)
    assert feed.watchers_count() == 1
    await watch.aclose()  # type: ignore[attr-defined]
    assert feed.watchers_count() == 0


async def test_a_watcher_gets_snapshot_then_changes_without_a_gap() -> None:
    """No event is lost between the snapshot and the first change."""
    feed = KvEventFeed(epoch=1, history_max=10, buffer_max=10)
    feed.append_nowait([KvStored(block_hashes=[1])])
    watch = feed.watch()
    first = await anext(watch)
    feed.append_nowait([KvStored(block_hashes=[2], parent_hash=1)])
    second = await anext(watch)
    assert (first.is_snapshot, first.sequence, second.is_snapshot, second.sequence) == (True, 1, False, 2)
    await watch.aclose()  # type: ignore[attr-defined]


async def test_a_watcher_that_lags_is_ended() -> None:
    """A watcher whose buffer is full ends with OverloadedError, so that the router subscribes again."""
    feed = KvEventFeed(epoch=1, history_max=10, buffer_max=2)
    watch = feed.watch()
    await anext(watch)
    for number in range(4):
        feed.append_nowait([KvStored(block_hashes=[number])])
    with pytest.raises(OverloadedError) as caught:
        async for _ in watch:
            pass
    assert caught.value.reason == "watcher_too_slow"
