"""Stores of the frontend when their disk is full: a typed error, nothing half-written, and what was stored stays."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import UnavailableError
from services.frontend.settings import ResponsesSettings
from services.frontend.stores.contents import DirectoryContents, NewFile
from services.frontend.stores.database import DISK_FULL
from services.frontend.stores.responses import MIGRATIONS, ResponseStore
from services.frontend.stores.sqlite import SqliteDatabase

FILE_BYTES_MAX = 1 << 16
PAGES = "PRAGMA max_page_count = 64"
"""SQLite reports the same error for a file that may not grow as for a full disk."""


@contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond FILE_BYTES_MAX."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def put(store: ResponseStore, number: int) -> None:
    body = {"id": f"resp_{number}", "previous_response_id": None, "output": ["x" * 20_000]}
    await store.put("me", body, items=[])


async def fill(store: ResponseStore) -> int:
    """Stores responses until one is refused. Returns how many are stored."""
    for number in range(100):
        try:
            await put(store, number)
        except UnavailableError:
            return number
    return 100


async def test_a_full_database_keeps_what_it_has(tmp_path: Path) -> None:
    """Refused writes change nothing and leave no open transaction: reads go on, and so do writes once there is room."""
    database = SqliteDatabase(tmp_path / "r.sqlite", (*MIGRATIONS, PAGES), busy_timeout_s=10.0)
    await database.open()
    store = ResponseStore(database, ResponsesSettings(), SystemClock())
    stored = await fill(store)
    assert 3 < stored < 100
    for _ in range(3):
        with pytest.raises(UnavailableError) as failure:
            await put(store, stored)
        assert failure.value.reason == DISK_FULL
    for number in range(stored):
        assert (await store.get(owner="me", response_id=f"resp_{number}")).body["id"] == f"resp_{number}"
    await store.delete(owner="me", response_id="resp_0")
    await put(store, stored)
    await database.aclose()


def write(file: NewFile, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        file.write(bytes(size))
    file.commit()


@pytest.mark.parametrize("sizes", [(FILE_BYTES_MAX + 1,), (FILE_BYTES_MAX, 1)], ids=["write", "commit"])
def test_a_file_that_finds_no_room_is_gone(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Whether a write or only the commit meets the full disk: a typed error, and no part of the file is left."""
    file = DirectoryContents(tmp_path).new("file-1")
    with small_files():
        with pytest.raises(UnavailableError) as failure:
            write(file, sizes)
        assert failure.value.reason == DISK_FULL
        file.discard()
        file.discard()
    assert list(tmp_path.iterdir()) == []
