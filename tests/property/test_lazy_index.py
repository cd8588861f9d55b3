"""The lazy index, compared with a reference. Lookups are rare, so that most operations affect pending runs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.index.holder_index import bits
from services.router.index.lazy_index import PENDING_HOLDERS_MAX, RUN_BLOCKS_MIN, LazyIndex
from services.simulation.invariants import blocks_of
from tests.index_checks import flush_all, matches

HOLDERS = 4
LENGTH = 40
PROMPTS = [list(range(1, LENGTH + 1))]
for branch, depth in enumerate((12, 20, 0, 31, 12, 1), 1):
    PROMPTS.append(PROMPTS[-1][:depth] + [1000 * branch + each for each in range(depth, LENGTH)])

holder = st.integers(0, HOLDERS - 1)
number = st.integers(0, len(PROMPTS) - 1)
place = st.integers(0, LENGTH)
ORDERS = ("from the end", "from the start", "mixed")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), holder, number, st.just(0), place),
        st.tuples(st.just("goes on"), holder, number, st.integers(1, 12), st.just(0)),
        st.tuples(st.just("goes on"), holder, number, st.just(LENGTH), st.just(0)),
        st.tuples(st.just("again"), holder, number, st.integers(0, 12), st.just(0)),
        st.tuples(st.just("anywhere"), holder, number, place, place),
        st.tuples(st.just("ends"), holder, number, st.integers(1, LENGTH), st.just(0)),
        st.tuples(st.just("ends"), holder, number, st.integers(1, LENGTH), st.just(0)),
        st.tuples(st.just("ends of two"), holder, number, number, st.integers(1, LENGTH)),
        st.tuples(st.sampled_from(ORDERS), holder, number, place, place),
        st.tuples(st.sampled_from(["dropped", "at once", "swept"]), holder, number, st.just(0), place),
        st.tuples(st.just("asked"), holder, number, st.integers(1, LENGTH), st.just(0)),
    ),
    max_size=40,
)


class IndexWithReference:
    """The index, and the sets of blocks that it must equal."""

    def __init__(self, pending_blocks_max: int) -> None:
        self.index = LazyIndex(pending_blocks_max=pending_blocks_max)
        self.slots = list(range(HOLDERS))
        self.held: dict[int, set[int]] = {bit: set() for bit in self.slots}
        for bit in self.slots:
            self.index.add_holder(bit)

    def store(self, bit: int, prompt: list[int], start: int, end: int, *, at_once: bool = False) -> None:
        if start < end:
            store = self.index.store if at_once else self.index.store_lazily
            run = prompt[start:end]
            store(bit, tuple(run), prompt[start - 1] if start else None)
            self.held[bit].update(run)

    def remove(self, bit: int, gone: list[int]) -> None:
        if gone:
            known = self.held[bit] & set(gone)
            assert self.index.remove(bit, tuple(gone)) == len(gone) - len(known)
            self.held[bit] -= known

    def end(self, bit: int, prompt: list[int]) -> int:
        return next((i for i, block in enumerate(prompt) if block not in self.held[bit]), len(prompt))

    def ask(self, prompt: list[int]) -> None:
        found = {bit: match.depth for match in matches(self.index, prompt) for bit in bits(match.holders)}
        assert found == {bit: end for bit in self.slots if (end := self.end(bit, prompt))}

    def replace(self, slot: int) -> None:
        """Gives an emptied holder another bit, as `KvIndex` does."""
        bit = self.slots[slot]
        self.index.drop_holder(bit)
        del self.held[bit]
        self.slots[slot] = next(new for new in range(99) if new not in self.slots and not self.index.traces >> new & 1)
        self.index.add_holder(self.slots[slot])
        self.held[self.slots[slot]] = set()

    def step(self, what: str, slot: int, number: int, first: int, second: int) -> None:
        bit, prompt = self.slots[slot], PROMPTS[number]
        if what == "stored":
            self.store(bit, prompt, 0, second)
        elif what == "goes on":
            end = self.end(bit, prompt)
            self.store(bit, prompt, end, min(end + first, LENGTH))
        elif what == "again":
            self.store(bit, prompt, 0, min(self.end(bit, prompt) + first, LENGTH))
        elif what == "anywhere":
            self.store(bit, prompt, first, second)
        elif what == "ends":
            self.remove(bit, self._ends(bit, prompt, first))
        elif what == "ends of two":
            ends = self._ends(bit, prompt, LENGTH) + self._ends(bit, PROMPTS[first], second)
            self.remove(bit, list(dict.fromkeys(ends)))
        elif what in ORDERS:
            gone = (
                sorted(prompt[first:second], key=lambda block: block * 7 % 11)
                if what == "mixed"
                else prompt[first:second]
            )
            self.remove(bit, gone[::-1] if what == "from the end" else gone)
        elif what == "dropped":
            self.replace(slot)
        elif what == "at once":
            self.replace(slot)
            self.store(self.slots[slot], prompt, 0, second, at_once=True)
        elif what == "swept":
            self.index.sweep(second)
        else:
            self.ask(prompt[:first])

    def _ends(self, bit: int, prompt: list[int], count: int) -> list[int]:
        """Returns the last `count` blocks that the holder has of the prompt, the last block first."""
        return [block for block in reversed(prompt) if block in self.held[bit]][:count]


@settings(max_examples=400, deadline=None)
@given(steps, st.sampled_from([20, 60, 10_000]))
def test_pending_runs_count(history, pending_blocks_max):
    """For any order of operations, the counts are right after every step, and so are the results of lookups and the final contents.

    Operations store whole prompts and parts, evict from the end and elsewhere, drop holders and look prompts up.
    """
    pair = IndexWithReference(pending_blocks_max)
    for each in history:
        pair.step(*each)
        bit = pair.slots[each[1]]
        assert pair.index.count(bit) == len(pair.held[bit])
        assert blocks_of(pair.index, bit) == pair.held[bit]
    for bit, held in pair.held.items():
        assert blocks_of(pair.index, bit) == held
    assert len(pair.index) >= len(set().union(*pair.held.values()))
    for prompt in PROMPTS:
        pair.ask(prompt)
    flush_all(pair.index)
    while pair.index.sweep(7):
        pass
    assert len(pair.index) == len(set().union(*pair.held.values()))
    for prompt in PROMPTS:
        pair.ask(prompt)


@settings(max_examples=120, deadline=None)
@given(steps)
def test_dropped_holders_leave_no_pending_runs(history):
    """After all holders are dropped, the index has no entry, also of runs that were pending."""
    pair = IndexWithReference(10_000)
    for each in history:
        pair.step(*each)
    for bit in pair.slots:
        pair.index.drop_holder(bit)
    while pair.index.sweep(7):
        pass
    index = pair.index
    assert (len(index), index.holders, index.heads, index._pending) == (0, {}, {}, {})


block = st.integers(1, 30)
runs = st.lists(block, min_size=1, max_size=20)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("srl"), st.integers(0, 2), runs, st.one_of(st.none(), block)), max_size=40))
def test_invalid_chains_do_not_damage_the_index(history):
    """Runs may be in any order, with repeated blocks and any parent. Lookups may then be wrong, but dropped holders still leave nothing."""
    index = LazyIndex(pending_blocks_max=40)
    for bit in range(3):
        index.add_holder(bit)
    for what, bit, run, parent in history:
        if what == "s":
            index.store_lazily(bit, run, parent)
        elif what == "r":
            index.remove(bit, run)
        else:
            matches(index, run)
    for bit in range(3):
        index.drop_holder(bit)
    while index.sweep(7):
        pass
    assert (len(index), index.heads, index._pending) == (0, {}, {})


def waiting_index(holders: int = 3) -> LazyIndex:
    index = LazyIndex()
    for bit in range(holders):
        index.add_holder(bit)
    return index


def test_a_prompt_without_lookups_never_enters_the_dictionaries():
    """A prefill worker stores a prompt in parts, a decode worker block by block at its end. They evict it from its end in several events."""
    index, prompt, other = waiting_index(), PROMPTS[0], [block + 500 for block in PROMPTS[0]]
    for each in (prompt, other):
        index.store_lazily(0, each[:11])
        index.store_lazily(0, each[11:], each[10])
        index.store_lazily(1, each[:38])
        for i in (38, 39):
            index.store_lazily(1, each[i : i + 1], each[i - 1])
    assert (index.count(0), index.count(1), len(index.holders)) == (80, 80, 0)
    for bit in (0, 1):
        assert index.remove(bit, prompt[:30:-1]) == 0
        assert index.remove(bit, prompt[30::-1] + other[:20:-1]) == 0
        assert index.count(bit) == 21
        assert index.remove(bit, other[:21]) == 0
    assert (index.count(0), index.count(1), index.holders, index.heads, index._pending) == (0, 0, {}, {}, {})


def test_a_lookup_enters_only_the_runs_on_its_path():
    """The lookup enters the run at the start of its prompt with all its holders, and then its continuations. Other prompts stay pending."""
    index = waiting_index()
    index.store(0, PROMPTS[0][:12])
    index.store_lazily(0, PROMPTS[0][12:], PROMPTS[0][11])
    index.store_lazily(0, PROMPTS[1][12:30], PROMPTS[0][11])
    index.store_lazily(1, PROMPTS[3])
    index.store_lazily(2, PROMPTS[3][:20])
    assert [(match.depth, match.holders) for match in matches(index, PROMPTS[1])] == [(30, 1)]
    assert (index.count(0), len(index.holders), len(index.heads)) == (58, 30, 2)
    assert [(match.depth, match.holders) for match in matches(index, PROMPTS[3])] == [(20, 4), (40, 2)]
    assert (len(index.holders), len(index.heads)) == (70, 1)


def test_a_run_does_not_wait_for_a_removed_parent():
    """After an eviction out of order, a run that is stored again from the parent on shares blocks with the pending run."""
    index, prompt = waiting_index(), PROMPTS[0]
    index.store(0, prompt[:12])
    index.store_lazily(0, prompt[12:30], prompt[11])
    assert index.remove(0, prompt[10:12]) == 0
    index.store_lazily(0, prompt[10:], prompt[9])
    assert (index.count(0), blocks_of(index, 0)) == (LENGTH, set(prompt))
    assert index.remove(0, prompt[::-1]) == 0
    assert (index.count(0), blocks_of(index, 0), matches(index, prompt)) == (0, set(), [])


def test_runs_that_are_short_or_have_many_holders_are_not_pending():
    """The dictionaries share blocks of many holders. A list of a few blocks takes more memory than they do."""
    index, prompt = waiting_index(PENDING_HOLDERS_MAX + 1), PROMPTS[0]
    for bit in range(PENDING_HOLDERS_MAX):
        index.store_lazily(bit, prompt)
    assert (len(index.heads), len(index.holders)) == (1, 0)
    index.store_lazily(PENDING_HOLDERS_MAX, prompt)
    assert (index.heads, len(index.holders)) == ({}, LENGTH)
    index.store_lazily(0, PROMPTS[3][: RUN_BLOCKS_MIN - 1])
    assert (index.heads, len(index.holders)) == ({}, LENGTH + RUN_BLOCKS_MIN - 1)


def test_pending_blocks_are_limited():
    """The oldest runs of a holder enter the dictionaries when it has too many pending blocks."""
    index = LazyIndex(pending_blocks_max=100)
    index.add_holder(0)
    for first in range(0, 1000, 50):
        index.store_lazily(0, range(first, first + 50))
    assert (index.count(0), len(index.holders), len(index.heads)) == (1000, 900, 2)
