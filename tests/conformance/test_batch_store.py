"""The rows of batches in progress, on each database. A process that lost its lease can change nothing."""

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


class TwoStores:
    """Two processes with the same data, and a clock that the test moves."""

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
        """Creates a batch and claims it for the first process."""
        await self.create()
        claim = await self.one.claim()
        assert claim is not None
        return claim

    async def row(self) -> dict[str, Any]:
        """Returns the batch without the columns of its lease."""
        return {
            key: value
            for key, value in dict(await self.one.get(owner="me", batch_id="b1")).items()
            if not key.startswith("lease")
        }


@pytest.fixture
async def stores_pair(stores: StoreCase, monkeypatch: pytest.MonkeyPatch) -> TwoStores:
    monkeypatch.setattr(batches, "TENANT_SHARE", 1.0)
    monkeypatch.setattr(batches, "DEFECTS_MAX", 2)
    return TwoStores(await stores.batches(), await stores.batches())


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
async def test_without_the_lease_nothing_changes(stores_pair: TwoStores, change: str) -> None:
    """After a pause a process finds that another one claimed its batch. All its later calls are refused, and neither rows nor results change."""
    lost = await stores_pair.claimed()
    await stores_pair.clock.advance(10.0)
    claim = await stores_pair.two.claim()
    assert claim is not None and claim.batch_id == lost.batch_id
    before = await stores_pair.row()
    with pytest.raises(LeaseLostError):
        await CHANGES[change](stores_pair.one, lost)
    assert await stores_pair.row() == before
    assert await stores_pair.two.done_lines(claim) == set()
    # The new lease is not affected: its owner can continue, and no other process gets the batch.
    assert await stores_pair.one.claim() is None
    await CHANGES[change](stores_pair.two, claim)


@pytest.mark.parametrize("change", CHANGES)
async def test_a_batch_that_ended_changes_no_more(stores_pair: TwoStores, change: str) -> None:
    """After a batch has ended, all calls with its last claim are refused, and no process can claim it."""
    claim = await stores_pair.claimed()
    await stores_pair.one.end(claim, COMPLETED, output=None, errors=None)
    before = await stores_pair.row()
    with pytest.raises(LeaseLostError):
        await CHANGES[change](stores_pair.one, claim)
    assert await stores_pair.row() == before
    await stores_pair.clock.advance(50.0)
    assert await stores_pair.two.claim() is None


async def test_a_lease_lasts_until_its_end_and_as_long_as_it_is_renewed(stores_pair: TwoStores) -> None:
    """Another process can take over the batch when the lease ends, and not before."""
    claim = await stores_pair.claimed()
    await stores_pair.clock.advance(9.9)
    assert await stores_pair.two.claim() is None
    await stores_pair.one.renew(claim)
    await stores_pair.clock.advance(9.9)
    assert await stores_pair.two.claim() is None
    await stores_pair.clock.advance(0.1)
    assert await stores_pair.two.claim() == replace(claim, epoch=claim.epoch + 1)


async def test_a_line_has_one_result(stores_pair: TwoStores) -> None:
    """A line that ran twice counts once, with its first result."""
    claim = await stores_pair.claimed()
    await stores_pair.one.record(claim, [RESULT])
    await stores_pair.one.record(
        claim, [replace(RESULT, is_error=True, record=b"other"), replace(RESULT, line=2, is_error=True)]
    )
    assert await stores_pair.one.done_lines(claim) == {1, 2}
    row = await stores_pair.row()
    assert (row["completed"], row["failed"], row["input_tokens"], row["output_tokens"]) == (1, 1, 6, 4)
    assert await stores_pair.one.results(claim, after_line=0, is_error=False, count=9) == [(1, b"{}")]
    assert await stores_pair.one.results(claim, after_line=1, is_error=False, count=9) == []
    assert await stores_pair.one.results(claim, after_line=0, is_error=True, count=9) == [(2, b"{}")]


async def test_defects_are_bounded(stores_pair: TwoStores) -> None:
    """A batch fails after repeated defects of its workers. A batch that is only released does not."""
    claim = await stores_pair.claimed()
    for _ in range(5):
        await stores_pair.one.release(claim)
        claim = await stores_pair.two.claim() or claim
    await stores_pair.one.release(claim, after_defect=True)
    assert await stores_pair.two.claim() is None, "the batch must not be available immediately"
    await stores_pair.clock.advance(10.0)
    again = await stores_pair.two.claim()
    assert again is not None
    await stores_pair.two.release(again, after_defect=True)
    assert (await stores_pair.row())["status"] == FAILED


async def test_a_failure_is_no_defect(stores_pair: TwoStores) -> None:
    """A batch that hits failures such as a full disk waits for one lease time after each. It keeps its results and never fails."""
    claim = await stores_pair.claimed()
    await stores_pair.one.record(claim, [RESULT])
    for _ in range(5):
        await stores_pair.one.release(claim, after_failure=True)
        assert await stores_pair.two.claim() is None, "the batch must not be available immediately"
        await stores_pair.clock.advance(10.0)
        claim = await stores_pair.two.claim() or claim
    assert (await stores_pair.row())["status"] != FAILED
    assert await stores_pair.two.done_lines(claim) == {RESULT.line}


async def test_a_cancelled_batch_ends_cancelled(stores_pair: TwoStores) -> None:
    """A cancelled batch ends as cancelled, also if its window ended meanwhile. It cannot be cancelled again afterwards."""
    claim = await stores_pair.claimed()
    await stores_pair.one.begin(claim, total=1, model="tiny")
    assert (await stores_pair.two.cancel(owner="me", batch_id="b1"))["status"] == "cancelling"
    assert await stores_pair.one.renew(claim) == "cancelling"
    await stores_pair.one.expire(claim)
    assert await stores_pair.one.finalise(claim) == CANCELLED
    await stores_pair.one.end(claim, CANCELLED, output=None, errors=None)
    with pytest.raises(InvalidRequestError):
        await stores_pair.one.cancel(owner="me", batch_id="b1")


async def test_a_batch_whose_window_ended_is_expired(stores_pair: TwoStores) -> None:
    """A batch whose window ended gets the status `expired` instead of `completed`."""
    claim = await stores_pair.claimed()
    assert await stores_pair.one.finalise(claim) == COMPLETED
    await stores_pair.one.expire(claim)
    assert await stores_pair.one.finalise(claim) == EXPIRED


async def test_batches_are_bounded_and_old_ones_are_swept(stores_pair: TwoStores) -> None:
    """Ended batches count against the limit until they are swept."""
    claim = await stores_pair.claimed()
    await stores_pair.create("b2")
    await stores_pair.create("b3")
    with pytest.raises(OverloadedError):
        await stores_pair.create("b4")
    await stores_pair.one.end(claim, COMPLETED, output=None, errors=None)
    await stores_pair.clock.advance(99.0)
    assert await stores_pair.one.sweep() == 0
    await stores_pair.clock.advance(1.0)
    assert await stores_pair.one.sweep() == 1
    await stores_pair.create("b4")


async def test_processes_that_claim_at_once_get_different_batches(stores_pair: TwoStores) -> None:
    """Each batch has one owner, also if both processes claim at the same moment."""
    for number in range(3):
        await stores_pair.create(f"b{number}")
    claims = await asyncio.gather(*(store.claim() for store in (stores_pair.one, stores_pair.two) * 4))
    got = [claim.batch_id for claim in claims if claim is not None]
    assert sorted(got) == ["b0", "b1", "b2"]


async def test_the_limit_holds_when_processes_create_at_once(stores_pair: TwoStores) -> None:
    """There are never more batches than the limit, although each process counts before it adds."""
    created = await asyncio.gather(
        *(
            stores_pair.create(f"b{number}", store)
            for number in range(6)
            for store in (stores_pair.one, stores_pair.two)
        ),
        return_exceptions=True,
    )
    assert {type(each) for each in created} <= {dict, OverloadedError}
    rows, _ = await stores_pair.one.page("me", limit=20, after=None, endpoints=["/v1/chat/completions"])
    assert len(rows) == SETTINGS.batches_max


async def test_creating_again_creates_nothing(stores_pair: TwoStores) -> None:
    """A transaction runs again if its commit is not acknowledged. The second run does not create another batch."""
    await stores_pair.create()
    claim = await stores_pair.one.claim()
    assert (await stores_pair.create())["lease_epoch"] == 1
    assert await stores_pair.two.claim() is None and claim is not None


async def test_pages_are_in_order_and_belong_to_one_owner(stores_pair: TwoStores) -> None:
    """Batches created at the same moment are ordered by the bytes of their id. A page starts after the last batch of the previous page. Other
    owners cannot read the batches."""
    names = ["b_1", "bA", "ba"]
    for name in names:
        await stores_pair.create(name)
    endpoints = ["/v1/chat/completions"]
    first, has_more = await stores_pair.two.page("me", limit=2, after=None, endpoints=endpoints, newest_first=False)
    assert ([row["id"] for row in first], has_more) == (["bA", "b_1"], True)
    rest, has_more = await stores_pair.two.page("me", limit=2, after="b_1", endpoints=endpoints, newest_first=False)
    assert ([row["id"] for row in rest], has_more) == (["ba"], False)
    assert await stores_pair.two.page("other", limit=9, after=None, endpoints=endpoints) == ([], False)
    for read in (stores_pair.two.get, stores_pair.two.cancel, stores_pair.two.delete):
        with pytest.raises(NotFoundError):
            await read(owner="other", batch_id="ba")
