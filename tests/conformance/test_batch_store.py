"""The rows of batches under work, on each database: what a process that lost its lease may still do, which is nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from kvmesh.core import Usage
from kvmesh.errors import InvalidRequestError, NotFoundError, OverloadedError
from services.frontend.settings import BatchSettings
from services.frontend.stores import batches
from services.frontend.stores.batch_rows import CANCELLED, COMPLETED, EXPIRED, FAILED, Claim
from services.frontend.stores.batches import BatchStore, LeaseLostError, LineResult, OutputFile
from services.frontend.stores.database import Database, Row
from tests.conformance.manual_clock import ManualClock
from tests.conformance.store_cases import StoreCase, cluster, stores

__all__ = ["cluster", "stores"]

SETTINGS = BatchSettings(lease_s=10.0, batches_max=3, batch_ttl_s=100.0)
RESULT = LineResult(line=1, is_error=False, record=b"{}", usage=Usage(prompt_tokens=3, output_tokens=2))
FILE = OutputFile(file_id="file-1", name="out.jsonl", size_bytes=9)


class Bench:
    """Two processes over the same data, and a clock that the test moves."""

    def __init__(self, first: Database, second: Database) -> None:
        self.clock = ManualClock()
        self.one = BatchStore(first, SETTINGS, self.clock, instance_id="one")
        self.two = BatchStore(second, SETTINGS, self.clock, instance_id="two")

    async def create(self, batch_id: str = "b1", store: BatchStore | None = None) -> Row:
        return await (store or self.one).create(
            owner="me", batch_id=batch_id, endpoint="/v1/chat/completions", input_file_id="f", completion_window="24h",
            window_s=1000.0, metadata=None, output_ttl_s=None,
        )  # fmt: skip

    async def claimed(self) -> Claim:
        """A batch of the first process's."""
        await self.create()
        claim = await self.one.claim()
        assert claim is not None
        return claim

    async def row(self) -> dict[str, Any]:
        """All of the batch, without whose it is."""
        return {
            key: value
            for key, value in dict(await self.one.get(owner="me", batch_id="b1")).items()
            if not key.startswith("lease")
        }


@pytest.fixture
async def bench(stores: StoreCase, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(batches, "TENANT_SHARE", 1.0)
    monkeypatch.setattr(batches, "DEFECTS_MAX", 2)
    return Bench(await stores.batches(), await stores.batches())


CHANGES: dict[str, Callable[[BatchStore, Claim], Awaitable[object]]] = {
    "renew": lambda store, claim: store.renew(claim),
    "release": lambda store, claim: store.release(claim),
    "release after a defect": lambda store, claim: store.release(claim, after_defect=True),
    "begin": lambda store, claim: store.begin(claim, total=5, model="tiny"),
    "fail": lambda store, claim: store.fail(claim, [{"code": "x"}]),
    "record": lambda store, claim: store.record(claim, [RESULT]),
    "expire": lambda store, claim: store.expire(claim),
    "finalise": lambda store, claim: store.finalise(claim),
    "end": lambda store, claim: store.end(claim, COMPLETED, output=FILE, errors=None),
    "read results": lambda store, claim: store.results(claim, after_line=0, is_error=False, count=9),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_without_the_lease_nothing_changes(bench: Bench, change: str) -> None:
    """A process that stood still finds its batch taken: whatever it does next is refused, and neither rows nor results change."""
    lost = await bench.claimed()
    await bench.clock.advance(10.0)
    claim = await bench.two.claim()
    assert claim is not None and claim.batch_id == lost.batch_id
    before = await bench.row()
    with pytest.raises(LeaseLostError):
        await CHANGES[change](bench.one, lost)
    assert await bench.row() == before
    assert await bench.two.done_lines(claim) == set()
    # The lease itself stands too: who has it goes on, and nobody else gets it.
    assert await bench.one.claim() is None
    await CHANGES[change](bench.two, claim)


@pytest.mark.parametrize("change", CHANGES)
async def test_a_batch_that_ended_changes_no_more(bench: Bench, change: str) -> None:
    """Its files are there and its results gone: nobody works on it again, its last owner included."""
    claim = await bench.claimed()
    await bench.one.end(claim, COMPLETED, output=None, errors=None)
    before = await bench.row()
    with pytest.raises(LeaseLostError):
        await CHANGES[change](bench.one, claim)
    assert await bench.row() == before
    await bench.clock.advance(50.0)
    assert await bench.two.claim() is None


async def test_a_lease_lasts_until_its_end_and_as_long_as_it_is_renewed(bench: Bench) -> None:
    """Another process takes over a moment after the lease, not before."""
    claim = await bench.claimed()
    await bench.clock.advance(9.9)
    assert await bench.two.claim() is None
    await bench.one.renew(claim)
    await bench.clock.advance(9.9)
    assert await bench.two.claim() is None
    await bench.clock.advance(0.1)
    assert await bench.two.claim() == replace(claim, epoch=claim.epoch + 1)


async def test_a_line_has_one_result(bench: Bench) -> None:
    """A line that ran twice counts once, and its first result stands."""
    claim = await bench.claimed()
    await bench.one.record(claim, [RESULT])
    await bench.one.record(
        claim, [replace(RESULT, is_error=True, record=b"other"), replace(RESULT, line=2, is_error=True)]
    )
    assert await bench.one.done_lines(claim) == {1, 2}
    row = await bench.row()
    assert (row["completed"], row["failed"], row["input_tokens"], row["output_tokens"]) == (1, 1, 6, 4)
    assert await bench.one.results(claim, after_line=0, is_error=False, count=9) == [(1, b"{}")]
    assert await bench.one.results(claim, after_line=1, is_error=False, count=9) == []
    assert await bench.one.results(claim, after_line=0, is_error=True, count=9) == [(2, b"{}")]


async def test_defects_are_bounded(bench: Bench) -> None:
    """A batch that breaks whoever works on it fails in the end; one that is only left does not."""
    claim = await bench.claimed()
    for _ in range(5):
        await bench.one.release(claim)
        claim = await bench.two.claim() or claim
    await bench.one.release(claim, after_defect=True)
    assert await bench.two.claim() is None, "not at once"
    await bench.clock.advance(10.0)
    again = await bench.two.claim()
    assert again is not None
    await bench.two.release(again, after_defect=True)
    assert (await bench.row())["status"] == FAILED


async def test_a_failure_is_no_defect(bench: Bench) -> None:
    """A batch that meets a full disk waits for a lease time, however often; it keeps its results and does not fail."""
    claim = await bench.claimed()
    await bench.one.record(claim, [RESULT])
    for _ in range(5):
        await bench.one.release(claim, after_failure=True)
        assert await bench.two.claim() is None, "not at once"
        await bench.clock.advance(10.0)
        claim = await bench.two.claim() or claim
    assert (await bench.row())["status"] != FAILED
    assert await bench.two.done_lines(claim) == {RESULT.line}


async def test_a_cancelled_batch_ends_cancelled(bench: Bench) -> None:
    """Also when its window ended or its lines were all done meanwhile; then it cannot be cancelled again."""
    claim = await bench.claimed()
    await bench.one.begin(claim, total=1, model="tiny")
    assert (await bench.two.cancel(owner="me", batch_id="b1"))["status"] == "cancelling"
    assert await bench.one.renew(claim) == "cancelling"
    await bench.one.expire(claim)
    assert await bench.one.finalise(claim) == CANCELLED
    await bench.one.end(claim, CANCELLED, output=None, errors=None)
    with pytest.raises(InvalidRequestError):
        await bench.one.cancel(owner="me", batch_id="b1")


async def test_a_window_that_ended_is_told(bench: Bench) -> None:
    """What was done counts, and the batch is called expired."""
    claim = await bench.claimed()
    assert await bench.one.finalise(claim) == COMPLETED
    await bench.one.expire(claim)
    assert await bench.one.finalise(claim) == EXPIRED


async def test_batches_are_bounded_and_old_ones_go(bench: Bench) -> None:
    """The limit counts ended batches until they are swept."""
    claim = await bench.claimed()
    await bench.create("b2")
    await bench.create("b3")
    with pytest.raises(OverloadedError):
        await bench.create("b4")
    await bench.one.end(claim, COMPLETED, output=None, errors=None)
    await bench.clock.advance(99.0)
    assert await bench.one.sweep() == 0
    await bench.clock.advance(1.0)
    assert await bench.one.sweep() == 1
    await bench.create("b4")


async def test_processes_that_claim_at_once_get_different_batches(bench: Bench) -> None:
    """Each batch has one holder, also when both look for batches at the same moment."""
    for number in range(3):
        await bench.create(f"b{number}")
    claims = await asyncio.gather(*(store.claim() for store in (bench.one, bench.two) * 4))
    got = [claim.batch_id for claim in claims if claim is not None]
    assert sorted(got) == ["b0", "b1", "b2"]


async def test_the_limit_holds_when_processes_create_at_once(bench: Bench) -> None:
    """No more batches than the limit, although each process counts before it adds."""
    created = await asyncio.gather(
        *(bench.create(f"b{number}", store) for number in range(6) for store in (bench.one, bench.two)),
        return_exceptions=True,
    )
    assert {type(each) for each in created} <= {dict, OverloadedError}
    rows, _ = await bench.one.page("me", limit=20, after=None, endpoints=["/v1/chat/completions"])
    assert len(rows) == SETTINGS.batches_max


async def test_creating_again_creates_nothing(bench: Bench) -> None:
    """A transaction whose commit is not acknowledged runs again."""
    await bench.create()
    claim = await bench.one.claim()
    assert (await bench.create())["lease_epoch"] == 1
    assert await bench.two.claim() is None and claim is not None


async def test_pages_are_in_order_and_belong_to_one_owner(bench: Bench) -> None:
    """Batches of one moment are ordered by id, byte by byte, and a page starts after the last one of the page before."""
    names = ["b_1", "bA", "ba"]
    for name in names:
        await bench.create(name)
    endpoints = ["/v1/chat/completions"]
    first, has_more = await bench.two.page("me", limit=2, after=None, endpoints=endpoints, newest_first=False)
    assert ([row["id"] for row in first], has_more) == (["bA", "b_1"], True)
    rest, has_more = await bench.two.page("me", limit=2, after="b_1", endpoints=endpoints, newest_first=False)
    assert ([row["id"] for row in rest], has_more) == (["ba"], False)
    assert await bench.two.page("other", limit=9, after=None, endpoints=endpoints) == ([], False)
    for read in (bench.two.get, bench.two.cancel, bench.two.delete):
        with pytest.raises(NotFoundError):
            await read(owner="other", batch_id="ba")
