"""The block pool against a slow, obvious account of who holds what."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvmesh.core import KvCleared, KvEvent, KvRemoved, KvStored
from kvmesh.engines.simulated.blocks import BlockPool

TOTAL = 12


def replay(names: set[int], events: list[KvEvent]) -> set[int]:
    """Applies events the way a router does; a removal of what is not there is a failure."""
    for event in events:
        match event:
            case KvStored():
                assert event.parent_hash is None or event.parent_hash in names
                assert not names & set(event.block_hashes), "stored twice"
                names |= set(event.block_hashes)
            case KvRemoved():
                assert names >= set(event.block_hashes)
                names -= set(event.block_hashes)
            case KvCleared():
                names = set()
    return names


class PoolMachine(RuleBasedStateMachine):
    """Prompts are chains of names below 40 with the same parent each time, so that prefixes are shared."""

    chains = Bundle("chains")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL, holes_max=3)
        self.held: list[list[int]] = []
        self.leased: list[list[int]] = []
        self.names: set[int] = set()

    @rule(target=chains, family=st.integers(0, 3), length=st.integers(1, 6), named=st.integers(0, 6))
    def admit(self, family: int, length: int, named: int) -> list[int]:
        names = [family * 10 + i for i in range(length)]
        cached = self.pool.match(names)
        missing = length - len(cached)
        if missing > self.pool.available - self.pool.idle_among(cached):
            return []
        self.pool.hold(cached)
        blocks = cached + self.pool.allocate(missing)
        assert len(set(blocks)) == length
        upto = max(len(cached), min(named, length))
        parent = names[len(cached) - 1] if cached else None
        self.pool.name(blocks[len(cached) : upto], names[len(cached) : upto], parent)
        self.held.append(blocks)
        return blocks

    @rule(blocks=consumes(chains))
    def finish(self, blocks: list[int]) -> None:
        if blocks:
            self.held.remove(blocks)
            self.pool.drop(blocks)

    @rule(target=leases, blocks=consumes(chains))
    def hand_out(self, blocks: list[int]) -> list[int]:
        if blocks:
            self.held.remove(blocks)
            self.leased.append(blocks)
            self.pool.lease(blocks)
        return blocks

    @rule(blocks=consumes(leases))
    def expire(self, blocks: list[int]) -> None:
        if blocks:
            self.leased.remove(blocks)
            self.pool.end_lease(blocks)

    @rule()
    def forget(self) -> None:
        self.pool.forget_idle()

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        """free + cached + held + leased = total, and each figure is what the account says."""
        counts = self.pool.counts()
        leased = {block for blocks in self.leased for block in blocks}
        held = {block for blocks in self.held for block in blocks} - leased
        assert (counts.held, counts.leased) == (len(held), len(leased))
        assert counts.free + counts.cached + counts.held + counts.leased == TOTAL
        assert self.pool.available == TOTAL - len(held | leased)

    @invariant()
    def events_give_the_cache(self) -> None:
        """Replayed changes, and a snapshot, both give the named blocks."""
        self.names = replay(self.names, self.pool.take_events())
        assert self.names == self.pool.cached_names() == replay({99}, self.pool.snapshot_events())


TestPool = PoolMachine.TestCase


@given(st.integers(1, 6))
def test_a_chain_is_evicted_from_its_end(evicted: int) -> None:
    """Eviction keeps prefixes usable: the last blocks of an idle chain go first."""
    pool = BlockPool(6)
    blocks = pool.allocate(6)
    pool.name(blocks, [10, 11, 12, 13, 14, 15], None)
    pool.drop(blocks)
    pool.allocate(evicted)
    assert pool.cached_names() == set(range(10, 16 - evicted))
