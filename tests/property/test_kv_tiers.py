"""All indexes together, compared with a slow reference: a set of blocks per holder and tier, and a list of placements."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core import KvTier
from services.router.core_settings import IndexSettings
from services.router.index.holder_index import bits
from services.router.index.kv_index import KvIndex
from tests.index_checks import matches

HOLDERS = 3
TIERS = (KvTier.DEVICE, KvTier.HOST)
LENGTH = 6
PROMPTS = [[100 * min(branch, depth) + depth + 1 for depth in range(LENGTH)] for branch in range(4)]

holder = st.integers(0, HOLDERS - 1)
branch = st.integers(0, len(PROMPTS) - 1)
length = st.integers(1, LENGTH)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), holder, st.sampled_from(TIERS), branch, length),
        st.tuples(st.just("stored"), holder, st.sampled_from(TIERS), branch, length),
        st.tuples(st.just("removed"), holder, st.sampled_from(TIERS), branch, length),
        st.tuples(st.just("predict"), holder, st.just(KvTier.DEVICE), branch, length),
        st.tuples(st.just("approximate"), holder, st.just(KvTier.DEVICE), branch, length),
        st.tuples(st.sampled_from(["dropped", "replaced", "swept", "waits"]), holder, st.none(), st.none(), length),
    ),
    max_size=50,
)


class ReferenceHolder:
    """The expected blocks and placements of one holder."""

    def __init__(self) -> None:
        self.held: dict[KvTier, set[int]] = {tier: set() for tier in TIERS}
        self.placed: dict[tuple[int, ...], float] = {}

    def depth(self, tier: KvTier, prompt: list[int]) -> int:
        return next((i for i, block in enumerate(prompt) if block not in self.held[tier]), len(prompt))

    def believed(self, prompt: list[int]) -> int:
        common = [sum(a == b for a, b in zip(prompt, each, strict=False)) for each in self.placed]
        return max(common, default=0)


@settings(max_examples=120, deadline=None)
@given(steps)
def test_every_index_has_the_same_bit_for_a_holder(history):
    """For any order of operations, every index returns the right depths of each holder, tier by tier."""
    index = KvIndex(IndexSettings(predicted_s=4.0, approximate_s=9.0))
    slots = [index.add_holder() for _ in range(HOLDERS)]
    known = {bit: ReferenceHolder() for bit in slots}
    now = 0.0
    for what, number, tier, chosen, count in history:
        bit = slots[number]
        run = PROMPTS[chosen][:count] if chosen is not None else []
        if what == "stored":
            index.tiers[tier].store(bit, run[-2:], run[-3] if count > 2 else None)
            index.predicted.confirm(bit, run[-2:])
            known[bit].held[tier].update(run[-2:])
            known[bit].placed = {k: v for k, v in known[bit].placed.items() if k[-1] not in run[-2:]}
        elif what == "removed":
            assert index.tiers[tier].remove(bit, run) == len(set(run) - known[bit].held[tier])
            known[bit].held[tier].difference_update(run)
        elif what in ("predict", "approximate"):
            place(index, known[bit], what, bit, run, now)
        elif what == "dropped":
            index.drop_holder(bit)
            del known[bit]
            slots[number] = index.add_holder()
            known[slots[number]] = ReferenceHolder()
        elif what == "replaced":
            slots[number] = index.add_holder()
            known[slots[number]] = ReferenceHolder()
            known[slots[number]].placed = known.pop(bit).placed
            index.replace_holder(bit, slots[number])
        elif what == "swept":
            index.sweep(count)
        else:
            now += count
            index.expire(now)
            for each in known.values():
                each.placed = {k: ends_at for k, ends_at in each.placed.items() if ends_at > now}
        check(index, known)
    while index.sweep(3):
        pass
    check(index, known)
    for tier in TIERS:
        assert len(index.tiers[tier]) == len(set().union(*(each.held[tier] for each in known.values())))
    for bit in slots:
        index.drop_holder(bit)
    while index.sweep(3):
        pass
    assert sum(map(len, index.tiers.values())) + len(index.predicted) == 0


def place(index: KvIndex, known: ReferenceHolder, what: str, bit: int, run: list[int], now: float) -> None:
    """Records a placement in the index and in the reference. A renewed placement keeps its first kind."""
    if what == "approximate":
        index.approximate(bit, run, now=now, blocks_max=1000)
    else:
        index.predict(bit, run, now=now)
        if run[-1] in known.held[KvTier.DEVICE]:
            return
    for each in [*known.placed]:
        if known.placed[each] <= now:
            del known.placed[each]
    kinds = index.predicted._records[bit][run[-1]].lifetime
    known.placed[tuple(run)] = now + kinds.ttl_s


def check(index: KvIndex, known: dict[int, ReferenceHolder]) -> None:
    for prompt in PROMPTS:
        for tier in TIERS:
            found = {bit: match.depth for match in matches(index.tiers[tier], prompt) for bit in bits(match.holders)}
            assert found == {bit: depth for bit, each in known.items() if (depth := each.depth(tier, prompt))}
        found = {bit: match.depth for match in matches(index.predicted, prompt) for bit in bits(match.holders)}
        assert found == {bit: depth for bit, each in known.items() if (depth := each.believed(prompt))}
    for bit, each in known.items():
        assert index.predicted.count(bit) == len({block for prompt in each.placed for block in prompt})
