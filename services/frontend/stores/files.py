"""Uploaded files and batch output: rows in SQLite, bytes in a directory."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from sqlite3 import Row
from threading import Lock
from typing import BinaryIO

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, NotFoundError, OverloadedError
from services.frontend.settings import BatchSettings
from services.frontend.stores.database import Connection, Database

_STALE_S = 86_400.0
"""An older file without a row belongs to a process that died before it added the row."""


class FileStore:
    """Files in one directory. A file gets its row after its bytes are on the disk, so a file with a row is complete."""

    def __init__(self, directory: Path, database: Database, settings: BatchSettings, clock: Clock) -> None:
        self._directory = directory / "files"
        self._database = database
        self._settings = settings
        self._clock = clock

    async def start(self) -> None:
        """Makes the directory."""
        await asyncio.to_thread(self._directory.mkdir, parents=True, exist_ok=True, mode=0o700)

    def path(self, file_id: str) -> Path:
        """Returns the path of a file's bytes. The frontend makes the ids, never a client."""
        return self._directory / file_id

    def new(self, file_id: str) -> "NewFile":
        """Starts to write a file."""
        return NewFile(self.path(file_id))

    async def add(
        self, owner: str, file_id: str, *, name: str, purpose: str, size_bytes: int, ttl_s: float | None
    ) -> Row:
        """Adds the row of a file that is on the disk. Raises OverloadedError if the store is full."""
        now_s = self._clock.wall()
        expires_s = now_s + (self._settings.file_ttl_s if ttl_s is None else ttl_s)
        values = (file_id, owner, name, purpose, size_bytes, now_s, expires_s)

        def work(connection: Connection) -> Row:
            self._check_room(connection, size_bytes)
            insert_file(connection, values)
            row: Row = connection.execute("SELECT * FROM files WHERE id = ?", (file_id,)).fetchone()
            return row

        return await self._database.call(work)

    def _check_room(self, connection: Connection, size_bytes: int) -> None:
        count, total = connection.execute("SELECT count(*), coalesce(sum(size_bytes), 0) FROM files").fetchone()
        if count >= self._settings.files_max or total + size_bytes > self._settings.files_bytes_max:
            raise OverloadedError("no room for another file; delete some", reason="files_full", retry_after_s=60.0)

    async def get(self, owner: str, file_id: str, *, field: str = "file_id") -> Row:
        """Raises NotFoundError if the file does not exist, has expired, or belongs to another owner."""
        now_s = self._clock.wall()

        def work(connection: Connection) -> Row | None:
            found: Row | None = connection.execute(
                "SELECT * FROM files WHERE id = ? AND owner = ? AND expires_s > ?", (file_id, owner, now_s)
            ).fetchone()
            return found

        row = await self._database.read(work)
        if row is None:
            raise NotFoundError(f"there is no file {file_id[:64]!r}", field=field, reason="file_not_found")
        return row

    async def page(
        self, owner: str, *, limit: int, after: str | None, purpose: str | None, newest_first: bool
    ) -> tuple[Sequence[Row], bool]:
        """Returns a page, and whether more files follow."""
        now_s = self._clock.wall()
        compare, order = ("<", "DESC") if newest_first else (">", "ASC")

        def work(connection: Connection) -> list[Row]:
            place = place_of(connection, "files", owner, after)
            return connection.execute(
                f"SELECT * FROM files WHERE owner = ? AND expires_s > ? AND (? IS NULL OR purpose = ?)"
                f" AND (? IS NULL OR (created_s, id) {compare} (?, ?)) ORDER BY created_s {order}, id {order} LIMIT ?",
                (owner, now_s, purpose, purpose, place and place[1], *(place or (None, None)), limit + 1),
            ).fetchall()

        rows = await self._database.read(work)
        return rows[:limit], len(rows) > limit

    async def delete(self, owner: str, file_id: str) -> None:
        """Raises NotFoundError, or InvalidRequestError while a batch that has not ended reads the file."""

        def work(connection: Connection) -> int:
            in_use = connection.execute(
                "SELECT 1 FROM batches WHERE input_file_id = ? AND owner = ? AND ended_s IS NULL", (file_id, owner)
            ).fetchone()
            if in_use:
                raise InvalidRequestError(
                    "a batch that has not ended reads this file", field="file_id", reason="file_in_use"
                )
            return connection.execute("DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner)).rowcount

        if not await self._database.call(work):
            raise NotFoundError(f"there is no file {file_id[:64]!r}", field="file_id", reason="file_not_found")
        await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    async def sweep(self) -> int:
        """Deletes expired files and old bytes without a row. Returns the number of files."""
        now_s = self._clock.wall()

        def work(connection: Connection) -> tuple[set[str], set[str]]:
            gone = connection.execute(
                "DELETE FROM files WHERE expires_s <= ? AND id NOT IN"
                " (SELECT input_file_id FROM batches WHERE ended_s IS NULL) RETURNING id",
                (now_s,),
            ).fetchall()
            left = connection.execute("SELECT id FROM files").fetchall()
            return {row["id"] for row in gone}, {row["id"] for row in left}

        gone, left = await self._database.call(work)
        return await asyncio.to_thread(self._remove, gone, left, now_s)

    def _remove(self, gone: set[str], left: set[str], now_s: float) -> int:
        count = 0
        for path in self._directory.iterdir():
            is_stale = path.name not in left and path.stat().st_mtime < now_s - _STALE_S
            if path.name in gone or is_stale:
                path.unlink(missing_ok=True)
                count += 1
        return count


def insert_file(connection: Connection, values: Sequence[object]) -> None:
    """Inserts a row of `files`, in the order of its columns."""
    connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def place_of(connection: Connection, table: str, owner: str, after: str | None) -> tuple[float, str] | None:
    """Returns the position behind which a page begins. Raises InvalidRequestError if the row does not exist."""
    if after is None:
        return None
    row = connection.execute(f"SELECT created_s, id FROM {table} WHERE id = ? AND owner = ?", (after, owner)).fetchone()
    if row is None:
        raise InvalidRequestError(
            f"after must be an id of the list: {after[:64]!r}", field="after", reason="invalid_value"
        )
    return row["created_s"], row["id"]


class NewFile:
    """Writes a file under a temporary name until `commit`. All methods block; call them in a thread.

    `discard` may be called while a cancelled `write` still runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = path.with_name(f"{path.name}.part{os.getpid()}")
        self._lock = Lock()
        self._file: BinaryIO | None = None
        self._is_over = False
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        """Appends bytes. Does nothing after `commit` or `discard`."""
        with self._lock:
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
        with self._lock:
            self._write(b"")
            if self._file is None:
                return
            self._file.flush()
            os.fsync(self._file.fileno())
            self._close()
            self._beside.replace(self._path)

    def _close(self) -> None:
        self._is_over = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def discard(self) -> None:
        """Removes the file unless it was committed. Idempotent."""
        with self._lock:
            self._close()
            self._beside.unlink(missing_ok=True)
