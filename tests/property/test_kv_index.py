"""The KV index, compared with a slow reference that checks each holder's set of blocks block by block."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.index.holder_index import HolderIndex, bits
from services.router.index.lookup_cache import ENTRIES_MAX, SENTINELS_MAX, LookupCache
from services.simulation.invariants import blocks_of
from tests.index_checks import matches

HOLDERS = 4
# A small tree of prompts. Each block has its parent, and chains branch.
PARENTS = {
    1: None,
    2: 1,
    3: 2,
    4: 3,
    5: 4,
    6: 5,
    7: 6,
    8: 7,
    12: 1,
    13: 12,
    14: 13,
    15: 14,
    24: 3,
    25: 24,
    26: 25,
    31: None,
    32: 31,
}


def chain(block: int) -> list[int]:
    """Returns the prompt that ends with this block."""
    path: list[int] = []
    current: int | None = block
    while current is not None:
        path.append(current)
        current = PARENTS[current]
    return path[::-1]


class ReferenceIndex:
    """Defines the expected results: a set of blocks per holder."""

    def __init__(self) -> None:
        self.held: dict[int, set[int]] = {}

    def depth(self, bit: int, prompt: list[int]) -> int:
        return next((i for i, block in enumerate(prompt) if block not in self.held[bit]), len(prompt))


blocks = st.sampled_from(sorted(PARENTS))
stored = st.tuples(st.just("stored"), st.integers(0, HOLDERS - 1), blocks, st.integers(1, 8))
removed = st.tuples(
    st.just("removed"), st.integers(0, HOLDERS - 1), st.lists(blocks, min_size=1, max_size=6), st.none()
)
dropped = st.tuples(st.just("dropped"), st.integers(0, HOLDERS - 1), st.none(), st.none())
swept = st.tuples(st.just("swept"), st.just(0), st.integers(1, 12), st.none())
steps = st.lists(st.one_of(stored, stored, removed, removed, dropped, swept), max_size=60)


@settings(max_examples=400, deadline=None)
@given(steps)
def test_matches_equal_those_of_the_reference_index(history):
    """For any order of stores, evictions (also of middle blocks), drops and sweeps, the overlap is the number of leading blocks held."""
    index, reference = HolderIndex(), ReferenceIndex()
    slots = list(range(HOLDERS))
    for bit in slots:
        index.add_holder(bit)
        reference.held[bit] = set()
    for kind, holder, what, length in history:
        bit = slots[holder]
        if kind == "stored":
            run = chain(what)[-length:]
            index.store(bit, run, PARENTS[run[0]])
            reference.held[bit] |= set(run)
        elif kind == "removed":
            unknown = index.remove(bit, what)
            gone = reference.held[bit] & set(what)
            assert unknown == len(what) - len(gone)
            reference.held[bit] -= gone
        elif kind == "dropped":
            index.drop_holder(bit)
            del reference.held[bit]
            slots[holder] = next(new for new in range(99) if new not in slots and not index.traces >> new & 1)
            index.add_holder(slots[holder])
            reference.held[slots[holder]] = set()
        else:
            index.sweep(what)
        check(index, reference)
    while index.sweep(7):
        pass
    check(index, reference)
    assert len(index) == len(set().union(*reference.held.values()))


def check(index: HolderIndex, reference: ReferenceIndex) -> None:
    # The cache keeps a lookup that is made twice, and checks it with a few probes from then on, also for prompts with the same beginning.
    for leaf in (8, 8, 8, 15, 26, 32, 32, 32, 5, 5, 5, 15, 15, 15):
        prompt = chain(leaf)
        found = {bit: match.depth for match in matches(index, prompt) for bit in bits(match.holders)}
        assert found == {bit: depth for bit in reference.held if (depth := reference.depth(bit, prompt))}
    for bit, held in reference.held.items():
        assert index.count(bit) == len(held)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 63), st.integers(0, 300)), max_size=40), st.integers(1, 300))
def test_long_prompts_with_many_holders(heads, length):
    """Skipping over long chains finds every holder's depth. Each depth is returned once, in ascending order."""
    index = HolderIndex()
    slots = list(range(64))
    for bit in slots:
        index.add_holder(bit)
    prompt = list(range(1000, 1000 + 300))
    depths: dict[int, int] = {}
    for holder, head in heads:
        if head:
            index.store(slots[holder], prompt[:head])
            depths[slots[holder]] = max(head, depths.get(slots[holder], 0))
    found = matches(index, prompt[:length])
    assert [match.depth for match in found] == sorted({match.depth for match in found})
    assert {bit: m.depth for m in found for bit in bits(m.holders)} == {b: min(d, length) for b, d in depths.items()}


def test_removed_blocks_free_their_memory():
    """Blocks that are stored and removed in any order leave no entry, also those whose parent stays."""
    index = HolderIndex()
    bit = 0
    index.add_holder(bit)
    index.store(bit, [1])
    for child in range(100, 5100):
        index.store(bit, [child, child + 10_000], 1)
        index.remove(bit, [child])
        index.remove(bit, [child + 10_000])
    assert index.count(bit) == 1
    assert len(index._children) + sum(len(known) for known in index._children.values() if isinstance(known, set)) < 400
    assert sum(map(len, index._cuts.values())) < 200
    index.remove(bit, [1])
    index.store(bit, list(range(20_000, 20_500)))
    index.remove(bit, list(range(20_000, 20_500)))
    assert len(index) == 0
    assert not any(20_000 <= block < 20_500 for block in index._children), (
        "a run that was removed at once leaves no entry"
    )


PROMPTS = [[1, *range(100 * branch, 100 * branch + 40)] for branch in range(1, 4)]
for later, cut in ((1, 20), (2, 33)):
    PROMPTS[later][:cut] = PROMPTS[0][:cut]
changes = st.tuples(st.integers(0, 7), st.booleans(), st.integers(0, 2), st.integers(1, 41))
lookups = st.tuples(st.none(), st.just(True), st.integers(0, 2), st.integers(1, 41))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(changes, lookups, lookups), max_size=60))
def test_a_cached_lookup_equals_a_new_one(history):
    """Prompts with common parts are looked up repeatedly while holders gain and lose blocks."""
    index, reference = HolderIndex(), ReferenceIndex()
    for bit in range(8):
        index.add_holder(bit)
        reference.held[bit] = set()
    for bit, is_stored, branch, length in history:
        prompt = PROMPTS[branch]
        if bit is not None and is_stored:
            index.store(bit, prompt[:length])
            reference.held[bit] |= set(prompt[:length])
        elif bit is not None:
            index.remove(bit, prompt[length - 1 :])
            reference.held[bit] -= set(prompt[length - 1 :])
        else:
            for _ in range(3):
                found = {b: match.depth for match in matches(index, prompt[:length]) for b in bits(match.holders)}
                assert found == {b: depth for b in reference.held if (depth := reference.depth(b, prompt[:length]))}


def test_a_lookup_is_cached_until_the_holders_of_its_ends_change():
    """A cached lookup takes one or two probes per depth, and also applies to longer prompts unless a holder has the whole prompt."""
    holders = {block: 0b111 if block < 3 else 0b001 for block in range(10)}
    prompt, found = list(range(20)), ((3, 10), (0b110, 0b001))
    cache = LookupCache()
    assert cache.find(prompt, holders.get) is None
    cache.add(prompt, found, holders.get)
    assert cache.find(prompt, holders.get) is None
    cache.add(prompt, found, holders.get)
    probed = []
    assert cache.find(prompt, lambda block: probed.append(block) or holders.get(block)) == found
    assert probed == [0, 2, 3, 9, 10]
    assert cache.find(prompt[:11], holders.get) == cache.find([*prompt, 99], holders.get) == found
    assert cache.find(prompt[:10], holders.get) is None
    holders[10] = 0b001
    assert cache.find(prompt, holders.get) is None
    whole = ((3, 11), (0b110, 0b001))
    cache.add(prompt[:11], whole, holders.get)
    cache.add(prompt[:11], whole, holders.get)
    assert cache.find(prompt[:11], holders.get) == whole
    assert cache.find(prompt, holders.get) is None
    cache.clear()
    assert cache.find(prompt[:11], holders.get) is None


def test_a_dropped_holder_is_in_no_lookup():
    """A lookup that was cached before the drop must not return the holder's bit, whether or not its blocks are swept."""
    index, prompt = HolderIndex(), list(range(100, 140))
    for bit in (0, 1):
        index.add_holder(bit)
        index.store(bit, prompt[: 20 + 10 * bit])
    for _ in range(3):
        assert index.prefixes(prompt) == ((20, 30), (0b01, 0b10))
    index.remove(1, [prompt[3]])
    assert index.has_cuts(1)
    index.drop_holder(1)
    assert not index.has_cuts(1), "the next holder with this bit must not have cuts"
    assert index.prefixes(prompt) == ((20,), (0b01,))
    assert blocks_of(index, 1) == set()
    index.drop_holder(0)
    assert index.prefixes(prompt) == ((), ())
    while index.sweep(7):
        pass
    assert len(index) == index.traces == 0
    index.add_holder(1)
    assert index.prefixes(prompt) == ((), ())
    assert index.count(1) == 0


def test_the_lookup_cache_is_bounded():
    """Both the number of lookups and the number of sentinel blocks of a lookup are limited."""
    cache, holders = LookupCache(), {}
    for first in range(3 * ENTRIES_MAX):
        cache.add([first, -1], ((1,), (1,)), holders.get)
    assert len(cache._lookups) <= ENTRIES_MAX
    many = (tuple(range(1, SENTINELS_MAX + 1)), (1,) * SENTINELS_MAX)
    for _ in range(2):
        cache.add(list(range(-9, 200)), many, holders.get)
    assert -9 not in cache._lookups
