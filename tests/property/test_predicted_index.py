"""The index of a router's own placements, compared with a slow reference: a list of placements with their ends."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.index.holder_index import bits
from services.router.index.predicted_index import Lifetime, PredictedIndex
from tests.index_checks import matches

SHORT = Lifetime(ttl_s=5.0, placements_max=6)
LONG = Lifetime(ttl_s=20.0, placements_max=9)
HOLDERS = 4
LENGTHS = (1, 2, 3, 5, 8, 13)


def prompt(branch: int, length: int) -> list[int]:
    """Returns a prompt of a tree, in which branch b differs from branch b - 1 from depth b + 1 on."""
    return [1000 * min(branch, depth) + depth for depth in range(length)]


@dataclass
class Placed:
    bit: int
    blocks: tuple[int, ...]
    ends_at: float
    lifetime: Lifetime
    order: int


class ReferenceIndex:
    """Defines the expected results: the newest placements of a holder and of a lifetime stay until their end."""

    def __init__(self, blocks_max: int) -> None:
        self.placed: list[Placed] = []
        self.blocks_max = blocks_max
        self.order = 0

    def add(self, bit, blocks, now, lifetime, most):
        blocks = tuple(blocks[:most])
        self.expire(now)
        self.order += 1
        known = [each for each in self.placed if (each.bit, each.blocks) == (bit, blocks)]
        if known:
            known[0].ends_at, known[0].order = now + known[0].lifetime.ttl_s, self.order
            self.placed.sort(key=lambda each: each.order)
            return
        self.placed.append(
            Placed(bit=bit, blocks=blocks, ends_at=now + lifetime.ttl_s, lifetime=lifetime, order=self.order)
        )
        while most is not None and len(self.blocks_of(bit)) > most and len(self.of(bit)) > 1:
            self.placed.remove(self.of(bit)[0])
        while len(queue := [each for each in self.placed if each.lifetime is lifetime]) > lifetime.placements_max:
            self.placed.remove(queue[0])

    def of(self, bit):
        return [each for each in self.placed if each.bit == bit]

    def blocks_of(self, bit):
        return {block for each in self.of(bit) for block in each.blocks}

    def expire(self, now):
        self.placed = [each for each in self.placed if each.ends_at > now]

    def depths(self, asked):
        found: dict[int, int] = {}
        for each in self.placed:
            depth = next((i for i, (a, b) in enumerate(zip(asked, each.blocks, strict=False)) if a != b), None)
            depth = min(len(asked), len(each.blocks)) if depth is None else depth
            if depth:
                found[each.bit] = max(depth, found.get(each.bit, 0))
        return found


holders = st.integers(0, HOLDERS - 1)
prompts = st.builds(prompt, st.integers(0, 6), st.sampled_from(LENGTHS))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("predict"), holders, prompts),
        st.tuples(st.just("predict"), holders, prompts),
        st.tuples(st.just("approximate"), holders, prompts),
        st.tuples(st.just("stored"), holders, prompts),
        st.tuples(st.just("drop"), holders, st.none()),
        st.tuples(st.just("rename"), holders, st.none()),
        st.tuples(st.just("sweep"), holders, st.none()),
        st.tuples(st.just("wait"), st.integers(1, 12), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=120, deadline=None)
@given(steps)
def test_matches_equal_those_of_the_reference_index(history):
    """For any order of placements, renewals, confirmations, drops and pauses, depths, counts and bounds are as defined."""
    index, reference = PredictedIndex(blocks_max=10_000), ReferenceIndex(10_000)
    # Ranks 0 and 1 send events, 2 and 3 do not. All placements of a holder have one lifetime.
    slots = list(range(HOLDERS))
    for bit in slots:
        index.add_holder(bit)
    now = 0.0
    for kind, holder, blocks in history:
        if kind == "wait":
            now += holder
            index.expire(now)
            reference.expire(now)
            check(index, reference, slots)
            continue
        bit = slots[holder]
        if kind == "predict":
            index.add(bit, blocks, now=now, lifetime=SHORT)
            reference.add(bit, blocks, now, SHORT, None)
        elif kind == "approximate":
            index.add(bit, blocks, now=now, lifetime=LONG, holder_blocks_max=10)
            reference.add(bit, blocks, now, LONG, 10)
        elif kind == "stored":
            index.confirm(bit, blocks)
            reference.placed = [each for each in reference.placed if each.bit != bit or each.blocks[-1] not in blocks]
        elif kind in ("drop", "rename"):
            slots[holder] = next(new for new in range(99) if new not in slots and not index.traces >> new & 1)
            index.add_holder(slots[holder])
            if kind == "rename":
                index.rename(bit, slots[holder])
                for each in reference.of(bit):
                    each.bit = slots[holder]
            else:
                reference.placed = [each for each in reference.placed if each.bit != bit]
            index.drop_holder(bit)
            while index.sweep(1):
                pass
        check(index, reference, slots)
    index.expire(now + 100)
    assert (len(index), index._first, index._blocks, index._records, index._counts) == (0, {}, 0, {}, {})


def check(index: PredictedIndex, reference: ReferenceIndex, slots: list[int]) -> None:
    assert len(index) == len(reference.placed)
    for bit in slots:
        assert index.count(bit) == len(reference.blocks_of(bit))
    for branch in (0, 2, 4, 6):
        for length in (1, 4, 13):
            found = matches(index, prompt(branch, length))
            assert [match.depth for match in found] == sorted({match.depth for match in found})
            depths = {bit: match.depth for match in found for bit in bits(match.holders)}
            assert depths == reference.depths(prompt(branch, length))


def test_the_number_of_blocks_is_limited():
    """A block counts once, however many workers it is predicted on. The oldest placements make room."""
    index = PredictedIndex(blocks_max=100)
    for bit in range(3):
        index.add_holder(bit)
        index.add(bit, range(1, 61), now=0.0, lifetime=SHORT)
    assert (len(index), index._blocks) == (3, 60)
    index.add(0, range(1001, 1061), now=1.0, lifetime=SHORT)
    assert (len(index), index.count(0), index._blocks) == (1, 60, 60)


def test_a_dropped_holder_is_removed_immediately():
    """Lookups exclude the holder before any sweep. Its bit is free when no entry has it."""
    index = PredictedIndex(blocks_max=100)
    index.add_holder(3)
    index.add(3, [1, 2], now=0.0, lifetime=SHORT)
    index.add(3, [1, 5], now=0.0, lifetime=SHORT)
    index.drop_holder(3)
    assert (matches(index, [1, 2]), index.count(3), index.traces) == ([], 0, 8)
    assert index.sweep(1)
    assert not index.sweep(10)
    assert (index.traces, len(index)) == (0, 0)
