"""Overlap that is zero by construction is found, and chance is never taken for it."""

from random import Random

from services.router.health.overlap import (
    FULL_FACTOR,
    PREFIXES_MAX,
    REPEATS,
    OverlapFault,
    OverlapWatch,
)


def feed(watch: OverlapWatch, first_hash: int, now: float, *, held: bool = False, named: int = 50) -> bool:
    if watch.has_matched or not watch.is_repeat(first_hash, now):
        return False
    return watch.on_repeat(is_cached=held, cached_blocks=named, blocks_total=1000)


def test_repeats_that_never_match_are_a_fault_told_once():
    """The first placement of a prompt repeats none."""
    watch = OverlapWatch()
    news = [feed(watch, 7, 2.0 * n) for n in range(2 * REPEATS)]
    assert news.index(True) == REPEATS
    assert news.count(True) == 1
    assert watch.fault is OverlapFault.HASHES


def test_a_worker_that_tells_of_no_block_has_another_fault():
    """Prefix caching that is off is not a seed that differs."""
    watch = OverlapWatch()
    assert any(feed(watch, 7, 2.0 * n, named=0) for n in range(2 * REPEATS))
    assert watch.fault is OverlapFault.NO_BLOCKS


def test_prompts_that_never_repeat_are_no_fault():
    """Unique prompts have no overlap by nature."""
    generator, watch = Random(1), OverlapWatch()
    assert not any(feed(watch, generator.getrandbits(64), 0.1 * n) for n in range(5000))
    assert len(watch.first_blocks) == PREFIXES_MAX


def test_a_burst_of_equal_prompts_is_no_fault():
    """The second of a burst comes before the first is computed."""
    watch = OverlapWatch()
    assert not any(feed(watch, 7, 0.001 * n) for n in range(900))


def test_one_match_proves_that_hashes_agree():
    """Before and after it misses are chance: evictions, resets."""
    watch = OverlapWatch()
    for n in range(4):
        feed(watch, 7, 2.0 * n)
    feed(watch, 7, 10.0, held=True)
    assert not any(feed(watch, 7, 20.0 + 2.0 * n) for n in range(1000))
    assert not watch.first_blocks


def test_a_full_cache_needs_more_evidence():
    """Small caches evict a prompt before it comes again."""
    watch = OverlapWatch()
    news = [feed(watch, 7, 2.0 * n, named=950 if n == 3 else 10) for n in range(2 * REPEATS * FULL_FACTOR)]
    assert news.index(True) == REPEATS * FULL_FACTOR


def test_block_sizes_are_compared_at_once():
    """No evidence to wait for; a worker that is asked in its own size again has no fault."""
    watch = OverlapWatch()
    assert watch.on_block_size(is_same=False)
    assert not watch.on_block_size(is_same=False)
    assert watch.fault is OverlapFault.BLOCK_SIZE
    assert not watch.on_block_size(is_same=True)
    assert watch.fault is None
