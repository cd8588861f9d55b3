"""Uploaded files, on each database: every process can read what one process stores."""

import asyncio
import time
from pathlib import Path

import pytest

from kvmesh.errors import InvalidRequestError, NotFoundError, OverloadedError
from services.frontend.settings import BatchSettings
from services.frontend.stores.batches import BatchStore
from services.frontend.stores.database import Row
from services.frontend.stores.files import FileStore
from tests.conformance.manual_clock import ManualClock
from tests.conformance.store_cases import StoreCase, cluster, stores

__all__ = ["cluster", "stores"]

SETTINGS = BatchSettings(files_max=4, files_bytes_max=8 << 20, file_ttl_s=100.0)
PART = 1 << 20


class TwoStores:
    """Two processes with the same data."""

    def __init__(self, one: FileStore, two: FileStore, batches: BatchStore, clock: ManualClock) -> None:
        self.one, self.two, self.batches, self.clock = one, two, batches, clock

    async def upload(self, name: str, data: bytes, owner: str = "me") -> Row:
        file = self.one.new(name)
        try:
            file.write(data)
            return await self.one.keep_and_add(file, owner=owner, name="in.jsonl", purpose="batch")
        finally:
            file.discard()


@pytest.fixture
async def stores_pair(stores: StoreCase) -> TwoStores:
    clock = ManualClock()
    first, second = await stores.batches(), await stores.batches()
    one, two = (
        FileStore(contents=stores.contents(each, clock), database=each, settings=SETTINGS, clock=clock)
        for each in (first, second)
    )
    for store in (one, two):
        await store.start()
    return TwoStores(one=one, two=two, batches=BatchStore(second, SETTINGS, clock, instance_id="two"), clock=clock)


async def content(store: FileStore, file_id: str) -> bytes:
    return b"".join([part async for part in store.read(file_id)])


def files_in(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file() and "files" in path.parent.name]


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART])
async def test_files_arrive_unchanged(stores_pair: TwoStores, size: int) -> None:
    """A file of any size arrives unchanged, in parts and as a local file."""
    data = bytes(number % 251 for number in range(1000)) * (size // 1000 + 1)
    row = await stores_pair.upload("file-a", data[:size])
    assert row["size_bytes"] == size
    assert await content(stores_pair.two, "file-a") == data[:size]
    async with stores_pair.two.local("file-a") as path:
        assert path.read_bytes() == data[:size]


async def test_reading_an_unknown_file_raises(stores_pair: TwoStores) -> None:
    with pytest.raises(FileNotFoundError):
        await content(stores_pair.two, "file-none")


async def test_a_deleted_file_is_removed_for_all_processes(stores_pair: TwoStores, stores: StoreCase) -> None:
    """Deleting a file removes its row and its bytes for all processes. Only its owner may read and delete it."""
    await stores_pair.upload("file-a", b"x" * (PART + 5))
    with pytest.raises(NotFoundError):
        await stores_pair.two.delete(owner="other", file_id="file-a")
    with pytest.raises(NotFoundError):
        await stores_pair.two.get(owner="other", file_id="file-a")
    await stores_pair.two.delete(owner="me", file_id="file-a")
    with pytest.raises(NotFoundError):
        await stores_pair.one.get(owner="me", file_id="file-a")
    with pytest.raises(FileNotFoundError):
        await content(stores_pair.one, "file-a")
    assert files_in(stores.directory) == []


async def test_a_file_that_a_batch_reads_is_not_deleted(stores_pair: TwoStores) -> None:
    """Its owner cannot delete the file, and it does not expire."""
    await stores_pair.upload("file-a", b"x")
    await stores_pair.batches.create(
        owner="me", batch_id="b", endpoint="/v1/chat/completions", input_file_id="file-a", completion_window="24h",
        window_s=1000.0, metadata=None, output_ttl_s=None,
    )  # fmt: skip
    with pytest.raises(InvalidRequestError):
        await stores_pair.one.delete(owner="me", file_id="file-a")
    await stores_pair.clock.advance(101.0)
    assert await stores_pair.one.sweep() == 0
    assert await content(stores_pair.two, "file-a") == b"x"


async def test_limits_hold_for_all_processes_together(stores_pair: TwoStores) -> None:
    """One owner may have half of the files. The limits count the files of all processes, and a refused file leaves no bytes."""
    for number in range(2):
        await stores_pair.upload(f"file-{number}", b"x")
    with pytest.raises(OverloadedError):
        await stores_pair.upload("file-2", b"x")
    with pytest.raises(FileNotFoundError):
        await content(stores_pair.one, "file-2")
    with pytest.raises(OverloadedError):
        await stores_pair.upload("file-3", b"x" * (4 * PART + 1), owner="other")
    await stores_pair.upload("file-4", b"x" * PART, owner="other")
    added = await asyncio.gather(
        *(
            store.add(owner=f"o{number}", file_id=f"file-{store is stores_pair.one}-{number}", name="n", purpose="batch",
                      size_bytes=1, ttl_s=None)
            for store in (stores_pair.one, stores_pair.two)
            for number in range(3)
        ),
        return_exceptions=True,
    )  # fmt: skip
    assert [type(each) for each in added].count(OverloadedError) == 5


async def test_refused_concurrent_uploads_leave_no_bytes(stores_pair: TwoStores) -> None:
    """Refused uploads leave no bytes, also if another upload reached the limit after their first check."""
    names = [f"file-{number}" for number in range(6)]
    ended = await asyncio.gather(
        *(stores_pair.upload(name, name.encode() * 9) for name in names), return_exceptions=True
    )
    assert [type(each) for each in ended].count(OverloadedError) == 6 - len([e for e in ended if isinstance(e, dict)])
    for name, each in zip(names, ended, strict=True):
        if isinstance(each, dict):
            assert await content(stores_pair.two, name) == name.encode() * 9
        else:
            with pytest.raises(FileNotFoundError):
                await content(stores_pair.two, name)


async def test_expired_files_are_swept(stores_pair: TwoStores) -> None:
    """A sweep in any process removes the rows and bytes of expired files, and keeps the others."""
    await stores_pair.upload("file-a", b"x")
    await stores_pair.clock.advance(50.0)
    await stores_pair.upload("file-b", b"y")
    await stores_pair.clock.advance(51.0)
    with pytest.raises(NotFoundError):
        await stores_pair.one.get(owner="me", file_id="file-a")
    assert await stores_pair.two.sweep() == 1
    with pytest.raises(FileNotFoundError):
        await content(stores_pair.one, "file-a")
    assert await content(stores_pair.one, "file-b") == b"y"


async def test_bytes_without_a_row_are_swept_after_a_day(stores_pair: TwoStores) -> None:
    """A process that dies before it writes the row leaves bytes. Younger bytes are kept, because their upload may be in progress."""
    await stores_pair.clock.advance(time.time() - stores_pair.clock.wall())  # Files on the disk have ages in real time.
    file = stores_pair.one.new("file-lost")
    file.write(b"x")
    await stores_pair.one.keep(file)
    await stores_pair.clock.advance(86_000.0)
    await stores_pair.two.sweep()
    assert await content(stores_pair.two, "file-lost") == b"x"
    await stores_pair.clock.advance(500.0)
    await stores_pair.two.sweep()
    with pytest.raises(FileNotFoundError):
        await content(stores_pair.one, "file-lost")


async def test_lists_are_filtered_by_owner_and_purpose(stores_pair: TwoStores) -> None:
    await stores_pair.upload("file-a", b"x")
    await stores_pair.upload("file-b", b"x", owner="other")
    for purpose, names in ((None, ["file-a"]), ("batch", ["file-a"]), ("batch_output", [])):
        rows, has_more = await stores_pair.two.page("me", limit=5, after=None, purpose=purpose, newest_first=True)
        assert ([row["id"] for row in rows], has_more) == (names, False)
