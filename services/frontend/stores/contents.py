"""Where the bytes of files are: in a directory of this machine, or in the shared database."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Protocol

from kvmesh.errors import UnavailableError
from services.frontend.stores.database import DISK_FULL, DISK_FULL_RETRY_S

_STALE_S = 86_400.0
"""Age after which bytes without a row are deleted: the process that wrote them died before it added the row."""
_PART_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk, the user's share of it, or what one file may have."""


class FileContents(Protocol):
    """The bytes of files, by id. The frontend makes the ids, never a client."""

    async def start(self) -> None:
        """Creates what must exist before files are written."""
        ...

    def new(self, file_id: str) -> "NewFile":
        """Starts to write a file on this machine."""
        ...

    async def keep(self, file: "NewFile") -> None:
        """Makes a committed file readable for all that share the store. Idempotent: equal files may be kept at the same time."""
        ...

    def path(self, file_id: str) -> Path | None:
        """Returns the path of the bytes, or None if they are elsewhere."""
        ...

    def local(self, file_id: str) -> AbstractAsyncContextManager[Path]:
        """Provides the bytes as a file of this machine while the context lasts. Raises FileNotFoundError."""
        ...

    def read(self, file_id: str) -> AsyncIterator[bytes]:
        """Yields the bytes in parts of at most 1 MiB. Raises FileNotFoundError."""
        ...

    async def remove(self, file_ids: Collection[str]) -> None:
        """Deletes bytes. Ids without bytes are ignored."""
        ...

    async def sweep(self, gone: set[str], left: set[str], now_s: float) -> int:
        """Deletes the bytes of rows that are `gone`, and old ones whose row is not in `left`. Returns the number of files."""
        ...


class DirectoryContents:
    """Files in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def start(self) -> None:
        await asyncio.to_thread(self._directory.mkdir, parents=True, exist_ok=True, mode=0o700)

    def new(self, file_id: str) -> "NewFile":
        return NewFile(self.path(file_id), file_id)

    async def keep(self, file: "NewFile") -> None:
        """Nothing to do: a committed file is in its place."""

    def path(self, file_id: str) -> Path:
        return self._directory / file_id

    @asynccontextmanager
    async def local(self, file_id: str) -> AsyncIterator[Path]:
        yield self.path(file_id)

    async def read(self, file_id: str) -> AsyncIterator[bytes]:
        file = await asyncio.to_thread(self.path(file_id).open, "rb")
        try:
            while data := await asyncio.to_thread(file.read, _PART_BYTES):
                yield data
        finally:
            await asyncio.shield(asyncio.to_thread(file.close))

    async def remove(self, file_ids: Collection[str]) -> None:
        for file_id in file_ids:
            await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    async def sweep(self, gone: set[str], left: set[str], now_s: float) -> int:
        return await asyncio.to_thread(sweep_directory, self._directory, gone, left, now_s=now_s)


def sweep_directory(directory: Path, gone: set[str], left: set[str], *, now_s: float) -> int:
    """Deletes the files in `gone`, and files that are not in `left` and older than a day. Returns their number."""
    count = 0
    for path in directory.iterdir():
        try:
            is_stale = path.name not in left and path.stat().st_mtime < now_s - _STALE_S
        except FileNotFoundError:
            continue  # Another process deleted it.
        if path.name in gone or is_stale:
            path.unlink(missing_ok=True)
            count += 1
    return count


class NewFile:
    """Writes a file under a temporary name until `commit`. All methods block; call them in a thread.

    `write` and `commit` raise UnavailableError if the disk is full or fails. `discard` may be called while a cancelled `write` still runs.
    """

    def __init__(self, path: Path, file_id: str) -> None:
        self.path = path
        self.file_id = file_id
        self._beside = path.with_name(f"{path.name}.part{os.getpid()}")
        self._lock = Lock()
        self._file: BinaryIO | None = None
        self._is_over = False
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        """Appends bytes. Does nothing after `commit` or `discard`."""
        with self._lock, _typed_errors():
            self._write(data)

    def _write(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._file is None:
            self._file = self._beside.open("wb")
            self._beside.chmod(0o600)
        self._file.write(data)
        self.size_bytes += len(data)

    def commit(self) -> None:
        """Completes the file. From then on it survives a crash of the machine."""
        with self._lock, _typed_errors():
            # Creates the file if nothing was written to it.
            self._write(b"")
            if self._file is None:
                return
            self._file.flush()
            # Before the rename, so that a crash cannot leave an incomplete file under the final name.
            os.fsync(self._file.fileno())
            self._close()
            self._beside.replace(self.path)
            # A crash could otherwise undo the rename, although the row of the file is already in the database.
            _sync_directory(self.path.parent)

    def _close(self) -> None:
        self._is_over = True
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def discard(self) -> None:
        """Removes the file unless it was committed. Idempotent."""
        with self._lock:
            # On a full disk the buffered bytes cannot be written; the file is closed nevertheless.
            with suppress(OSError):
                self._close()
            self._beside.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync directories.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_full = error.errno in _FULL
        raise UnavailableError(
            f"the file cannot be stored: {error.strerror}",
            reason=DISK_FULL if is_full else "store_unavailable",
            retry_after_s=DISK_FULL_RETRY_S if is_full else 1.0,
        ) from error
