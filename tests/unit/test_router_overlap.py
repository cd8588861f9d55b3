"""Detection of overlap that is impossible by construction, without false positives from chance."""

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


def test_repeats_that_never_match_are_reported_once():
    """After REPEATS repeats of a prompt without a match, the fault is reported once. The first placement is not a repeat."""
    watch = OverlapWatch()
    reported = [feed(watch, 7, 2.0 * n) for n in range(2 * REPEATS)]
    assert reported.index(True) == REPEATS
    assert reported.count(True) == 1
    assert watch.fault is OverlapFault.HASHES


def test_a_worker_without_blocks_has_another_fault():
    """A worker that reports no blocks at all has prefix caching turned off, which differs from a wrong hash seed."""
    watch = OverlapWatch()
    assert any(feed(watch, 7, 2.0 * n, named=0) for n in range(2 * REPEATS))
    assert watch.fault is OverlapFault.NO_BLOCKS


def test_unique_prompts_are_not_a_fault():
    """Prompts that never repeat have no overlap by nature, and the memory for their prefixes is bounded."""
    generator, watch = Random(1), OverlapWatch()
    assert not any(feed(watch, generator.getrandbits(64), 0.1 * n) for n in range(5000))
    assert len(watch.first_blocks) == PREFIXES_MAX


def test_a_burst_of_equal_prompts_is_not_a_fault():
    """Equal prompts of a burst arrive before the first one is computed."""
    watch = OverlapWatch()
    assert not any(feed(watch, 7, 0.001 * n) for n in range(900))


def test_one_match_proves_that_hashes_agree():
    """After one match, misses are due to evictions or resets and are never reported."""
    watch = OverlapWatch()
    for n in range(4):
        feed(watch, 7, 2.0 * n)
    feed(watch, 7, 10.0, held=True)
    assert not any(feed(watch, 7, 20.0 + 2.0 * n) for n in range(1000))
    assert not watch.first_blocks


def test_a_full_cache_needs_more_evidence():
    """A small cache may evict a prompt before it repeats."""
    watch = OverlapWatch()
    reported = [feed(watch, 7, 2.0 * n, named=950 if n == 3 else 10) for n in range(2 * REPEATS * FULL_FACTOR)]
    assert reported.index(True) == REPEATS * FULL_FACTOR


def test_block_sizes_are_compared_at_once():
    """A different block size is a fault at once, and the fault ends when an ask has the worker's block size."""
    watch = OverlapWatch()
    assert watch.on_block_size(is_same=False)
    assert not watch.on_block_size(is_same=False)
    assert watch.fault is OverlapFault.BLOCK_SIZE
    assert not watch.on_block_size(is_same=True)
    assert watch.fault is None
