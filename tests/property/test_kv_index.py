"""The KV index against a slow obvious one: every holder's set of blocks, walked block by block."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.index import HolderIndex, bits

HOLDERS = 4
# A small tree of prompts: block 0 is the root of all; (parent, block) pairs make chains that branch.
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
    """The prompt that ends with this block."""
    path: list[int] = []
    current: int | None = block
    while current is not None:
        path.append(current)
        current = PARENTS[current]
    return path[::-1]


class Obvious:
    """The definition of what the index promises."""

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
def test_matches_are_those_of_the_obvious_index(history):
    """Whatever is stored, evicted (middle blocks too), dropped and swept: overlap = leading blocks held consecutively."""
    index, obvious = HolderIndex(), Obvious()
    slots = list(range(HOLDERS))
    for bit in slots:
        index.add_holder(bit)
        obvious.held[bit] = set()
    for kind, holder, what, length in history:
        bit = slots[holder]
        if kind == "stored":
            run = chain(what)[-length:]
            index.stored(bit, run, PARENTS[run[0]])
            obvious.held[bit] |= set(run)
        elif kind == "removed":
            unknown = index.removed(bit, what)
            gone = obvious.held[bit] & set(what)
            assert unknown == len(what) - len(gone)
            obvious.held[bit] -= gone
        elif kind == "dropped":
            index.drop_holder(bit)
            del obvious.held[bit]
            slots[holder] = next(new for new in range(99) if new not in slots and not index.traces >> new & 1)
            index.add_holder(slots[holder])
            obvious.held[slots[holder]] = set()
        else:
            index.sweep(what)
        check(index, obvious)
    while index.sweep(7):
        pass
    check(index, obvious)
    assert len(index) == len(set().union(*obvious.held.values()))


def check(index: HolderIndex, obvious: Obvious) -> None:
    for leaf in (8, 15, 26, 32, 5):
        prompt = chain(leaf)
        found = {bit: match.depth for match in index.match(prompt) for bit in bits(match.holders)}
        assert found == {bit: depth for bit in obvious.held if (depth := obvious.depth(bit, prompt))}
    for bit, held in obvious.held.items():
        assert index.count(bit) == len(held)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 63), st.integers(0, 300)), max_size=40), st.integers(1, 300))
def test_long_prompts_with_many_holders(heads, length):
    """Jumps over long chains find every holder's depth, and each depth once, in ascending order."""
    index = HolderIndex()
    slots = list(range(64))
    for bit in slots:
        index.add_holder(bit)
    prompt = list(range(1000, 1000 + 300))
    depths: dict[int, int] = {}
    for holder, head in heads:
        if head:
            index.stored(slots[holder], prompt[:head])
            depths[slots[holder]] = max(head, depths.get(slots[holder], 0))
    found = index.match(prompt[:length])
    assert [match.depth for match in found] == sorted({match.depth for match in found})
    assert {bit: m.depth for m in found for bit in bits(m.holders)} == {b: min(d, length) for b, d in depths.items()}


def test_nothing_is_kept_of_what_left():
    """Blocks that came and went in any order leave no memory behind, hot parents with passing children included."""
    index = HolderIndex()
    bit = 0
    index.add_holder(bit)
    index.stored(bit, [1])
    for child in range(100, 5100):
        index.stored(bit, [child, child + 10_000], 1)
        index.removed(bit, [child])
        index.removed(bit, [child + 10_000])
    assert index.count(bit) == 1
    assert len(index._children) + sum(len(known) for known in index._children.values() if isinstance(known, set)) < 400
    assert sum(map(len, index._cuts.values())) < 200
