"""The block pool compared with a simple, slow reference that records the holders of each block."""

from dataclasses import dataclass
from itertools import count

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvmesh.core import KvCleared, KvEvent, KvRemoved, KvStored
from kvmesh.engines.simulated.blocks import BlockPool
from kvmesh.engines.simulated.free_blocks import FreeBlocks
from kvmesh.worker.kv_feed import KvLog

TOTAL = 12


def replay(names: set[int], events: list[KvEvent]) -> set[int]:
    """Applies events as a router does. Fails if an event removes a block that is not stored."""
    for event in events:
        match event:
            case KvStored():
                assert event.parent_hash is None or event.parent_hash in names
                assert not names & set(event.block_hashes), "a block is stored twice"
                names |= set(event.block_hashes)
            case KvRemoved():
                assert names >= set(event.block_hashes)
                names -= set(event.block_hashes)
            case KvCleared():
                names = set()
    return names


@dataclass(eq=False)
class Chain:
    """The blocks of one holder for `names`. The first `named` of them are complete."""

    names: list[int]
    blocks: list[int]
    named: int


class PoolMachine(RuleBasedStateMachine):
    """Prompts are chains of names with few variants, so that they share prefixes.

    They are named in pieces, so that another holder has often named the same block meanwhile.
    """

    spare = 0
    chains = Bundle("chains")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL, self.spare)
        self.held: list[Chain] = []
        self.leased: list[Chain] = []
        self.names: set[int] = set()
        self.log = KvLog(epoch=1, history_max=1, stores_whole_runs=True)

    @rule(target=chains, family=st.integers(0, 3), length=st.integers(1, 6), named=st.integers(0, 6))
    def admit(self, family: int, length: int, named: int) -> Chain:
        names = [family * 10 + i for i in range(length)]
        cached = self.pool.match(names)
        assert len(cached) == next((i for i, name in enumerate(names) if name not in self.names), length)
        chain = Chain(names, cached, len(cached))
        missing = length - len(cached)
        if missing > self.pool.available - self.pool.idle_among(cached):
            return Chain([], [], 0)
        self.pool.hold(cached)
        chain.blocks = cached + self.pool.allocate(missing)
        counts = self.pool.counts()
        assert counts.free >= self.spare or not counts.cached
        self.held.append(chain)
        self.compute(chain, named - len(cached))
        return chain

    @rule(chain=chains, count=st.integers(1, 3))
    def compute(self, chain: Chain, count: int) -> None:
        first, end = chain.named, min(chain.named + count, len(chain.names))
        if chain in self.held and end > first:
            parent = chain.names[first - 1] if first else None
            if end == first + 1:
                self.pool.name_one(chain.blocks, place=first, name=chain.names[first], parent=parent)
            else:
                self.pool.name(chain.blocks, first, chain.names[first:end], parent=parent)
            chain.named = end

    @rule(chain=chains, name=st.integers(0, 3))
    def grow(self, chain: Chain, name: int) -> None:
        """Allocates one more block, as a decoding leg does."""
        if chain in self.held and self.pool.available:
            chain.blocks.append(self.pool.allocate_one())
            chain.names.append(1 + name + 10 * chain.names[-1] + 100)

    @rule(chain=consumes(chains))
    def finish(self, chain: Chain) -> None:
        if chain in self.held:
            self.held.remove(chain)
            self.pool.drop(chain.blocks)

    @rule(target=leases, chain=consumes(chains))
    def hand_out(self, chain: Chain) -> Chain:
        if chain in self.held:
            self.held.remove(chain)
            self.leased.append(chain)
            self.pool.lease(chain.blocks)
        return chain

    @rule(chain=consumes(leases))
    def expire(self, chain: Chain) -> None:
        if chain in self.leased:
            self.leased.remove(chain)
            self.pool.end_lease(chain.blocks)

    @rule()
    def forget(self) -> None:
        self.pool.evict_idle()

    @invariant()
    def holders_share_only_named_blocks(self) -> None:
        """A chain contains each block once, and two chains share a block only if both have its name there."""
        seen: dict[int, int | None] = {}
        for chain in [*self.held, *self.leased]:
            assert len(set(chain.blocks)) == len(chain.blocks) == len(chain.names)
            for place, block in enumerate(chain.blocks):
                name = chain.names[place] if place < chain.named else None
                assert block not in seen or (name is not None and seen[block] == name)
                seen[block] = name

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        """free + cached + held + leased = total, and each count matches the reference."""
        counts = self.pool.counts()
        leased = {block for chain in self.leased for block in chain.blocks}
        held = {block for chain in self.held for block in chain.blocks} - leased
        assert (counts.held, counts.leased) == (len(held), len(leased))
        assert counts.free + counts.cached + counts.held + counts.leased == TOTAL
        assert self.pool.available == TOTAL - len(held | leased)

    @invariant()
    def events_give_the_cache(self) -> None:
        """Replaying the events, the pool's snapshot, or the log's snapshot gives the named blocks."""
        events = self.pool.take_events()
        self.names = replay(self.names, events)
        self.log.append(events)
        (snapshot,) = self.log.since(None, None)
        assert self.names == replay(set(), list(snapshot.events)) and len(self.names) == self.log.blocks_count()
        assert self.names == self.pool.cached_names() == replay({9999}, self.pool.snapshot_events())


class SparePoolMachine(PoolMachine):
    """The same with blocks that the pool keeps free."""

    spare = 3


TestPool = PoolMachine.TestCase
TestSparePool = SparePoolMachine.TestCase


@given(st.integers(1, 6))
def test_a_chain_is_evicted_from_its_end(evicted: int) -> None:
    """Prefixes stay usable, because the last blocks of an idle chain are evicted first."""
    pool = BlockPool(6)
    blocks = pool.allocate(6)
    pool.name(blocks, 0, [10, 11, 12, 13, 14, 15], parent=None)
    pool.drop(blocks)
    pool.allocate(evicted)
    assert pool.cached_names() == set(range(10, 16 - evicted))


@given(st.integers(1, 20).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, length), st.integers(0, 5))))
def test_a_prompt_shares_exactly_its_beginning(case: tuple[int, int, int]) -> None:
    """`match` returns exactly the blocks before the first difference. A block of another prompt would give wrong tokens."""
    length, shared, more = case
    pool = BlockPool(32)
    blocks = pool.allocate(length)
    pool.name(blocks, 0, list(range(100, 100 + length)), parent=None)
    prompt = [*range(100, 100 + shared), *range(500, 500 + more)]
    assert pool.match(prompt) == blocks[:shared]


def test_a_block_that_was_computed_twice_is_stored_once() -> None:
    """The second holder returns its own blocks, uses the blocks of the first, and its chain continues after them."""
    pool = BlockPool(8)
    first, second = pool.allocate(3), pool.allocate(4)
    pool.name(first, 0, [10, 11, 12], parent=None)
    pool.name(second, 0, [10, 11], parent=None)
    pool.name(second, 2, [12, 13], parent=11)
    assert second == [*first, 6] and pool.available == 8 - 4
    pool.drop(first)
    pool.drop(second)
    assert pool.match([10, 11, 12, 13]) == [*first, 6]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), max_size=40))
def test_free_blocks_are_taken_once_and_contiguously(rounds: list[tuple[int, int]]) -> None:
    """No block is taken twice. An allocation is contiguous if a run of that length is free, else it uses about as few runs as possible."""
    space, held, free = FreeBlocks(40), list[list[int]](), set(range(40))
    for size, place in rounds:
        if size <= len(free):
            longest = max(map(len, contiguous_runs(free)), default=0)
            taken = space.take(size) if size != 1 else [space.take_one()]
            assert taken == sorted(taken) and len(taken) == size and free >= set(taken)
            if size <= longest:
                assert len(contiguous_runs(set(taken))) <= 1
            else:
                assert 2 * max(map(len, contiguous_runs(set(taken)))) >= longest
            free -= set(taken)
            held.append(taken)
        elif held:
            given_back = held.pop(place % len(held))
            space.give(given_back)
            free |= set(given_back)
        assert space.count == len(free)


def contiguous_runs(blocks: set[int]) -> list[list[int]]:
    """Returns the runs of consecutive numbers among these blocks."""
    found: list[list[int]] = []
    for block in sorted(blocks):
        if found and found[-1][-1] == block - 1:
            found[-1].append(block)
        else:
            found.append([block])
    return found


def test_allocations_stay_contiguous_after_many_answers() -> None:
    """Blocks that many concurrent legs allocate one by one do not fragment the pool."""
    pool, names = BlockPool(4096, 256), count(1)
    for _ in range(16):
        legs = [pool.allocate(8) for _ in range(32)]
        for blocks in legs:
            pool.name(blocks, 0, [next(names) for _ in blocks], parent=None)
        for place in range(8, 16):
            for blocks in legs:
                blocks.append(pool.allocate_one())
                pool.name_one(blocks, place=place, name=next(names), parent=None)
        for blocks in legs:
            pool.drop(blocks)
    for _ in range(80):
        blocks = pool.allocate(125)
        assert len(contiguous_runs(set(blocks))) <= 2
        pool.name(blocks, 0, [next(names) for _ in blocks], parent=None)
        pool.drop(blocks)
