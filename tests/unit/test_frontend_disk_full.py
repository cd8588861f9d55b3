"""The frontend's stores on a full or failing disk: they raise a typed error, leave no partial writes, and keep their contents."""

import errno
import os
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
"""SQLite reports the same error for a file at its limit as for a full disk."""


@contextmanager
def small_files() -> Iterator[None]:
    """Limits the size of all files that this process writes to FILE_BYTES_MAX."""
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
    """Stores responses until one is refused. Returns the number of stored responses."""
    for number in range(100):
        try:
            await put(store, number)
        except UnavailableError:
            return number
    return 100


async def test_a_full_database_keeps_its_responses(tmp_path: Path) -> None:
    """Refused writes change nothing and leave no open transaction. Reads continue, and so do writes once there is room."""
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
def test_a_file_that_does_not_fit_is_removed(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """A full disk raises a typed error at a write or at the commit, and no part of the file remains."""
    file = DirectoryContents(tmp_path).new("file-1")
    with small_files():
        with pytest.raises(UnavailableError) as failure:
            write(file, sizes)
        assert failure.value.reason == DISK_FULL
        file.discard()
        file.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_committed_file_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are synced before the file gets its final name, and the directory afterwards: a crash undoes neither."""
    file, fsync = DirectoryContents(tmp_path).new("file-1"), os.fsync
    synced: list[tuple[bool, bool]] = []

    def record(descriptor: int) -> None:
        synced.append((os.path.samestat(os.fstat(descriptor), tmp_path.stat()), file.path.exists()))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", record)
    write(file, (1,))
    assert synced == [(False, False), (True, True)]


@pytest.mark.parametrize(("number", "is_stored"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_directory_that_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_stored: bool
) -> None:
    """A file system that cannot sync directories stores files nevertheless. A failure of the disk is an error."""
    file, fsync = DirectoryContents(tmp_path).new("file-1"), os.fsync

    def fail(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", fail)
    if is_stored:
        write(file, (1,))
        assert file.path.read_bytes() == b"\0"
    else:
        with pytest.raises(UnavailableError, match="cannot be stored"):
            write(file, (1,))
