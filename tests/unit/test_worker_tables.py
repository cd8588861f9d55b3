"""Slots, leases and block hashes: the data structures of a worker."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvmesh.core import FinishReason, Media, MediaKind
from kvmesh.engines.base import EngineFinish, StepOutput
from kvmesh.errors import LostError
from kvmesh.kv.blocks import block_hashes, chain_hash, pack_tokens, seed_hash, unpack_tokens
from kvmesh.kv.lease import LeaseTable
from kvmesh.worker.slots import LegRecord, LegTable, LinkStep, key_of, split_by_link


def record(leg_id: str, deadline_s: float = 10.0) -> LegRecord:
    """Returns the record of a decode leg."""
    return LegRecord(leg_id=leg_id, deadline_s=deadline_s)


def test_the_id_of_a_finished_leg_can_be_reused() -> None:
    """A frontend that places a request again may reuse the id. The table keeps nothing of ended legs."""
    legs = LegTable()
    legs.add(key_of(1, 2), record("a"))
    assert legs.has_leg_id("a")
    legs.remove(key_of(1, 2))
    assert not legs.has_leg_id("a")


def test_one_link_keeps_the_engines_lists() -> None:
    """With one frontend a step only maps keys to slots, and passes the token list on without a copy."""
    tokens = [5, 6, 7]
    output = StepOutput(step=1, keys=[key_of(3, 0), key_of(3, 9)], counts=[1, 2], token_ids=tokens)
    shares = split_by_link(output, (3,))
    assert shares == {3: LinkStep(slots=[0, 9], token_ids=[5, 6, 7], counts=[1, 2], finishes=[])}
    assert shares[3].token_ids is tokens


@given(
    entries=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 3)), max_size=30, unique_by=lambda e: e[:2]
    ),
    has_counts=st.booleans(),
)
def test_a_step_is_split_without_loss(entries: list[tuple[int, int, int]], has_counts: bool) -> None:
    """Each link gets exactly the tokens of its slots, in order, and its finishes."""
    if not has_counts:
        entries = [(link, slot, 1) for link, slot, _ in entries]
    tokens = list(range(sum(count for _, _, count in entries)))
    keys = [key_of(link, slot) for link, slot, _ in entries]
    output = StepOutput(
        step=4,
        keys=keys,
        counts=[count for _, _, count in entries] if has_counts else None,
        token_ids=tokens,
        finishes=[EngineFinish(key=key, reason=FinishReason.STOP) for key in keys[::2]],
    )
    links = tuple({link for link, _, _ in entries})
    shares = split_by_link(output, links)
    expected: dict[int, list[tuple[int, list[int]]]] = {}
    start = 0
    for link, slot, count in entries:
        expected.setdefault(link, []).append((slot, tokens[start : start + count]))
        start += count
    for link, share in shares.items():
        got, start = [], 0
        for position, slot in enumerate(share.slots):
            count = share.counts[position] if share.counts is not None else 1
            got.append((slot, share.token_ids[start : start + count]))
            start += count
        assert got == expected.get(link, [])
        assert all(finish.key >> 32 == link for finish in share.finishes)
    assert sum(len(share.finishes) for share in shares.values()) == len(keys[::2])


def test_a_finish_of_a_closed_link_is_not_sent_to_another() -> None:
    """Steps are split by the links of running legs, which include closed links until their legs end."""
    legs = LegTable()
    legs.add(key_of(0, 5), record("gone"))
    legs.add(key_of(1, 5), record("here"))
    links = legs.links()
    output = StepOutput(
        step=1,
        keys=[key_of(1, 5)],
        token_ids=[9],
        finishes=[EngineFinish(key=key_of(0, 5), reason=FinishReason.CANCELLED)],
    )
    shares = split_by_link(output, links)
    assert shares[1].finishes == [] and len(shares[0].finishes) == 1
    legs.remove(key_of(0, 5))
    assert legs.links() == (1,)


def test_a_deadline_is_collected_once() -> None:
    """A slot that is reused does not inherit the old deadline."""
    legs = LegTable()
    legs.add(1, record("first", deadline_s=5.0))
    legs.remove(1)
    legs.add(1, record("second", deadline_s=50.0))
    assert legs.collect_overdue(6.0) == []
    assert legs.collect_overdue(60.0) == [1]
    assert legs.collect_overdue(60.0) == []


def test_leases_expire_once_and_can_be_extended() -> None:
    """An extended lease expires at its new time, and a removed one never does."""
    leases = LeaseTable()
    leases.add("a", 5.0)
    leases.add("b", 5.0)
    leases.add("a", 8.0)
    assert leases.remove("b") and not leases.remove("b")
    assert leases.collect_expired(6.0) == []
    assert leases.collect_expired(8.0) == ["a"]
    assert len(leases) == 0


def test_a_lease_is_found_by_its_leg() -> None:
    """A caller that never received the handle can end its lease. The table keeps nothing of ended leases."""
    leases = LeaseTable()
    leases.add("a", 5.0, leg_id="leg-1")
    leases.add("b", 6.0, leg_id="leg-2")
    assert (leases.handle_of("leg-1"), leases.handle_of("leg-2"), leases.handle_of("leg-3")) == ("a", "b", None)
    leases.remove("a")
    assert leases.collect_expired(6.0) == ["b"]
    assert (leases.handle_of("leg-1"), leases.handle_of("leg-2")) == (None, None)
    leases.add("c", 5.0, leg_id="leg-1")
    leases.add("d", 5.0, leg_id="leg-1")
    leases.remove("c")
    assert leases.handle_of("leg-1") == "d"


def test_a_failed_leg_is_not_overdue() -> None:
    """A deadline that passes during the last step does not replace the failure."""
    legs = LegTable()
    legs.add(1, LegRecord(leg_id="a", deadline_s=5.0, failure=LostError("stopping")))
    legs.add(2, LegRecord(leg_id="b", deadline_s=5.0))
    assert legs.collect_overdue(4.9) == []
    assert legs.collect_overdue(5.0) == [2]
    assert legs.collect_overdue(6.0) == []


def test_block_hashes_follow_the_documented_formula() -> None:
    """The hashes can be computed from the documentation alone."""
    tokens = list(range(100, 170))
    seed = seed_hash("adapter", "tenant")
    assert seed == xxh3_64_intdigest(b"adapter\0tenant") and seed_hash() == 0
    first = xxh3_64_intdigest(struct.pack("<32I", *tokens[:32]), seed)
    second = xxh3_64_intdigest(struct.pack("<32I", *tokens[32:64]), first)
    assert block_hashes(tokens, 32, seed=seed) == [first, second]
    assert chain_hash(first, pack_tokens(tokens[32:64])) == second
    assert block_hashes(tokens[:31], 32, seed=seed) == block_hashes([], 32) == []


def test_packed_tokens_are_little_endian_words() -> None:
    """Encoded tokens are the same on every machine. An incomplete word is refused."""
    tokens = [0, 1, 2**16 + 5, 2**32 - 1]
    assert pack_tokens(tokens) == struct.pack("<4I", *tokens)
    assert list(unpack_tokens(pack_tokens(tokens))) == tokens and not unpack_tokens(b"")
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"\0" * 5)


def test_media_change_their_blocks_and_later_ones() -> None:
    """Two images behind equal placeholders do not share KV."""
    tokens = [1] * 64
    one = Media(kind=MediaKind.IMAGE, content_hash=b"a" * 16, position=20, length=4)
    other = Media(kind=MediaKind.IMAGE, content_hash=b"b" * 16, position=20, length=4)
    plain, first, second = (block_hashes(tokens, 16, media=media) for media in ((), (one,), (other,)))
    assert plain[0] == first[0] == second[0]
    assert len({plain[1], first[1], second[1]}) == 3 and len({plain[3], first[3], second[3]}) == 3


def test_a_block_hash_includes_the_offset_in_the_image() -> None:
    """An image shifted by some placeholders changes the KV of every block that it covers, also far from its start."""
    tokens = [1] * 64

    def names(position: int) -> list[int]:
        picture = Media(kind=MediaKind.IMAGE, content_hash=b"a" * 16, position=position, length=40)
        return block_hashes(tokens, 16, media=(picture,))

    # Both images start in the first block, whose offset into the image is 0 for both. The second block differs.
    at_0, at_4 = names(0), names(4)
    assert at_0[1] != at_4[1]
    digest = xxh3_64_intdigest(struct.pack("<16I", *tokens[:16]) + b"a" * 16 + struct.pack("<Q", 16), at_0[0])
    assert at_0[1] == digest
