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
from services.frontend.stores.database import Connection, Database, reads, writes

_STALE_S = 86_400.0
"""Age after which a file without a row is deleted: the process that wrote it died before it added the row."""


class FileStore:
    """Files in one directory. A file gets its row after its bytes are on the disk, so a file with a row is complete."""

    def __init__(self, *, directory: Path, database: Database, settings: BatchSettings, clock: Clock) -> None:
        self._directory = directory / "files"
        self.database = database
        self._settings = settings
        self._clock = clock

    async def start(self) -> None:
        """Creates the directory."""
        await asyncio.to_thread(self._directory.mkdir, parents=True, exist_ok=True, mode=0o700)

    def path(self, file_id: str) -> Path:
        """Returns the path of a file's bytes. The frontend makes the ids, never a client."""
        return self._directory / file_id

    def new(self, file_id: str) -> "NewFile":
        """Starts to write a file."""
        return NewFile(self.path(file_id))

    @writes
    def add(
        self,
        connection: Connection,
        *,
        owner: str,
        file_id: str,
        name: str,
        purpose: str,
        size_bytes: int,
        ttl_s: float | None,
    ) -> Row:
        """Adds the row of a file that is on the disk. Raises OverloadedError if the store is full."""
        settings = self._settings
        self._check_room(connection, size_bytes, settings.files_max, settings.files_bytes_max)
        if owner:
            share = settings.tenant_share_max
            self._check_room(
                connection, size_bytes, settings.files_max * share, settings.files_bytes_max * share, owner=owner
            )
        now_s = self._clock.wall()
        expires_s = now_s + (self._settings.file_ttl_s if ttl_s is None else ttl_s)
        insert_file(connection, (file_id, owner, name, purpose, size_bytes, now_s, expires_s))
        row: Row = connection.execute("SELECT * FROM files WHERE id = ?", (file_id,)).fetchone()
        return row

    def _check_room(
        self, connection: Connection, size_bytes: int, files_max: float, bytes_max: float, *, owner: str | None = None
    ) -> None:
        """Raises OverloadedError if another file exceeds the limits, of all files or of those of one owner."""
        count, total = connection.execute(
            "SELECT count(*), coalesce(sum(size_bytes), 0) FROM files WHERE ? IS NULL OR owner = ?", (owner, owner)
        ).fetchone()
        if count >= files_max or total + size_bytes > bytes_max:
            raise OverloadedError("no room for another file; delete some", reason="files_full", retry_after_s=60.0)

    @reads
    def get(self, connection: Connection, *, owner: str, file_id: str, field: str = "file_id") -> Row:
        """Returns a file. Raises NotFoundError if it does not exist, has expired, or belongs to another owner."""
        row: Row | None = connection.execute(
            "SELECT * FROM files WHERE id = ? AND owner = ? AND expires_s > ?", (file_id, owner, self._clock.wall())
        ).fetchone()
        if row is None:
            raise _not_found(file_id, field)
        return row

    @reads
    def page(
        self,
        connection: Connection,
        owner: str,
        *,
        limit: int,
        after: str | None,
        purpose: str | None,
        newest_first: bool,
    ) -> tuple[Sequence[Row], bool]:
        """Returns a page, and whether more files follow."""
        return read_page(
            connection,
            "files",
            owner,
            limit=limit,
            after=after,
            newest_first=newest_first,
            condition="expires_s > ? AND (? IS NULL OR purpose = ?)",
            values=(self._clock.wall(), purpose, purpose),
        )

    async def delete(self, *, owner: str, file_id: str) -> None:
        """Deletes a file. Raises NotFoundError, or InvalidRequestError while a batch that has not ended reads the file."""
        await self._delete_row(owner=owner, file_id=file_id)
        await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    @writes
    def _delete_row(self, connection: Connection, *, owner: str, file_id: str) -> None:
        in_use = connection.execute(
            "SELECT 1 FROM batches WHERE input_file_id = ? AND owner = ? AND ended_s IS NULL", (file_id, owner)
        ).fetchone()
        if in_use:
            raise InvalidRequestError(
                "a batch that has not ended reads this file", field="file_id", reason="file_in_use"
            )
        if not connection.execute("DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner)).rowcount:
            raise _not_found(file_id, "file_id")

    async def sweep(self) -> int:
        """Deletes expired files and old bytes without a row. Returns the number of files."""
        now_s = self._clock.wall()
        gone, left = await self._delete_expired_rows(now_s)
        return await asyncio.to_thread(self._remove, gone, left, now_s)

    @writes
    def _delete_expired_rows(self, connection: Connection, now_s: float) -> tuple[set[str], set[str]]:
        """Returns the ids of the deleted rows and of all others."""
        gone = connection.execute(
            "DELETE FROM files WHERE expires_s <= ? AND id NOT IN"
            " (SELECT input_file_id FROM batches WHERE ended_s IS NULL) RETURNING id",
            (now_s,),
        ).fetchall()
        left = connection.execute("SELECT id FROM files").fetchall()
        return {row["id"] for row in gone}, {row["id"] for row in left}

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


def read_page(
    connection: Connection,
    table: str,
    owner: str,
    *,
    limit: int,
    after: str | None,
    newest_first: bool = True,
    condition: str = "TRUE",
    values: Sequence[object] = (),
) -> tuple[Sequence[Row], bool]:
    """Returns a page of an owner's rows, and whether more follow. `after`: id of the last row of the page before.

    `values`: the parameters of `condition`. Raises InvalidRequestError if the row `after` does not exist.
    """
    compare, order = ("<", "DESC") if newest_first else (">", "ASC")
    place: tuple[object, ...] = ()
    if after is not None:
        row = connection.execute(
            f"SELECT created_s, id FROM {table} WHERE id = ? AND owner = ?", (after, owner)
        ).fetchone()
        if row is None:
            raise InvalidRequestError(
                f"after must be an id of the list: {after[:64]!r}", field="after", reason="invalid_value"
            )
        place = tuple(row)
        condition += f" AND (created_s, id) {compare} (?, ?)"
    rows = connection.execute(
        f"SELECT * FROM {table} WHERE owner = ? AND {condition} ORDER BY created_s {order}, id {order} LIMIT ?",
        (owner, *values, *place, limit + 1),
    ).fetchall()
    return rows[:limit], len(rows) > limit


def _not_found(file_id: str, field: str) -> NotFoundError:
    return NotFoundError(f"there is no file {file_id[:64]!r}", field=field, reason="file_not_found")


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
