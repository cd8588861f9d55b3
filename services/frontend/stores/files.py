"""Uploaded files and batch output: rows in the database, bytes where `FileContents` puts them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, MeshError, NotFoundError, OverloadedError
from services.frontend.settings import BatchSettings
from services.frontend.stores.contents import FileContents, NewFile
from services.frontend.stores.database import Database, DatabaseConnection, Row, reads, writes

TENANT_SHARE = 0.5
"""Largest part of the stored files and batches, and of the uploads at a time, of one tenant: another one always finds room."""


class FileStore:
    """A file gets its row after its bytes are stored, so a file with a row is complete."""

    def __init__(self, *, contents: FileContents, database: Database, settings: BatchSettings, clock: Clock) -> None:
        self._contents = contents
        self.database = database
        self._settings = settings
        self._clock = clock

    async def start(self) -> None:
        """Creates the directory in which files are written."""
        await self._contents.start()

    def new(self, file_id: str) -> NewFile:
        """Starts to write a file. The frontend makes the ids, never a client."""
        return self._contents.new(file_id)

    async def keep(self, file: NewFile) -> None:
        """Completes a file whose row is added later. From then on every frontend that shares the store can read its bytes."""
        await asyncio.to_thread(file.commit)
        await self._contents.keep(file)

    async def keep_and_add(
        self, file: NewFile, *, owner: str, name: str, purpose: str, ttl_s: float | None = None
    ) -> Row:
        """Completes a file and adds its row. Raises OverloadedError if the store is full, and InvalidRequestError for a name that cannot be
        stored; then no bytes remain."""
        size_bytes, file_id = file.size_bytes, file.file_id
        await self.check_room(owner=owner, file_id=file_id, size_bytes=size_bytes)
        try:
            await self.keep(file)
        except BaseException:
            # The caller may be cancelled again while the bytes are removed.
            await asyncio.shield(self._remove_rest(file_id))
            raise
        try:
            return await self.add(
                owner=owner, file_id=file_id, name=name, purpose=purpose, size_bytes=size_bytes, ttl_s=ttl_s
            )
        except (OverloadedError, InvalidRequestError):
            # Only refusals. After another error the row may exist, and then its bytes must stay.
            await self._remove_rest(file_id)
            raise

    async def _remove_rest(self, file_id: str) -> None:
        # Bytes that cannot be deleted now have no row and are swept later.
        with suppress(MeshError, OSError):
            await self._contents.remove([file_id])

    def local(self, file_id: str) -> AbstractAsyncContextManager[Path]:
        """Provides the bytes as a file on this machine, as long as the context lasts. Raises FileNotFoundError."""
        return self._contents.local(file_id)

    def path(self, file_id: str) -> Path | None:
        """Returns the path of the bytes, or None if they are not in a file of this machine; see `read`."""
        return self._contents.path(file_id)

    def read(self, file_id: str) -> AsyncIterator[bytes]:
        """Yields the bytes in parts. Raises FileNotFoundError."""
        return self._contents.read(file_id)

    @writes
    async def add(
        self,
        connection: DatabaseConnection,
        *,
        owner: str,
        file_id: str,
        name: str,
        purpose: str,
        size_bytes: int,
        ttl_s: float | None,
    ) -> Row:
        """Adds the row of a file whose bytes are stored. Raises OverloadedError if the store is full."""
        await connection.lock("files")
        await self._check_shares(connection, owner=owner, file_id=file_id, size_bytes=size_bytes)
        now_s = self._clock.wall()
        expires_s = now_s + (self._settings.file_ttl_s if ttl_s is None else ttl_s)
        await insert_file(connection, (file_id, owner, name, purpose, size_bytes, now_s, expires_s))
        row = await connection.row("SELECT * FROM files WHERE id = ?", file_id)
        if row is None:
            raise _not_found(file_id, field="file_id")
        return row

    @reads
    async def check_room(self, connection: DatabaseConnection, *, owner: str, file_id: str, size_bytes: int) -> None:
        """Raises OverloadedError if there is no room for a file, before its bytes are moved."""
        await self._check_shares(connection, owner=owner, file_id=file_id, size_bytes=size_bytes)

    async def _check_shares(self, connection: DatabaseConnection, *, owner: str, file_id: str, size_bytes: int) -> None:
        """Raises OverloadedError if another file exceeds the limits, of all files or of those of its owner."""
        settings = self._settings
        count_max, bytes_max = settings.files_max, settings.files_bytes_max
        # A row with this id is an earlier attempt to add it.
        used = await connection.row(f"{_USED} WHERE id <> ?", file_id)
        _check_room(used, size_bytes, files_max=count_max, bytes_max=bytes_max)
        if owner:
            used = await connection.row(f"{_USED} WHERE id <> ? AND owner = ?", file_id, owner)
            _check_room(used, size_bytes, files_max=count_max * TENANT_SHARE, bytes_max=bytes_max * TENANT_SHARE)

    @reads
    async def get(self, connection: DatabaseConnection, *, owner: str, file_id: str, field: str = "file_id") -> Row:
        """Returns a file. Raises NotFoundError if it does not exist, has expired, or belongs to another owner."""
        row = await connection.row(
            "SELECT * FROM files WHERE id = ? AND owner = ? AND expires_s > ?", file_id, owner, self._clock.wall()
        )
        if row is None:
            raise _not_found(file_id, field=field)
        return row

    @reads
    async def page(
        self,
        connection: DatabaseConnection,
        owner: str,
        *,
        limit: int,
        after: str | None,
        purpose: str | None,
        newest_first: bool,
    ) -> tuple[Sequence[Row], bool]:
        """Returns a page, and whether more files follow."""
        return await read_page(
            connection,
            "files",
            owner=owner,
            limit=limit,
            after=after,
            newest_first=newest_first,
            condition="expires_s > ?" if purpose is None else "expires_s > ? AND purpose = ?",
            values=(self._clock.wall(), *([] if purpose is None else [purpose])),
        )

    async def delete(self, *, owner: str, file_id: str) -> None:
        """Deletes a file. Raises NotFoundError, or InvalidRequestError while a batch that has not ended reads the file."""
        await self._delete_row(owner=owner, file_id=file_id)
        await self._contents.remove([file_id])

    @writes
    async def _delete_row(self, connection: DatabaseConnection, *, owner: str, file_id: str) -> None:
        # `BatchStore.create` takes this lock, too, so no batch begins to use the file in the meantime.
        await connection.lock("batches")
        in_use = await connection.row(
            "SELECT 1 AS found FROM batches WHERE input_file_id = ? AND owner = ? AND ended_s IS NULL LIMIT 1",
            file_id,
            owner,
        )
        if in_use is not None:
            raise InvalidRequestError(
                "the file is in use by a batch that has not ended", field="file_id", reason="file_in_use"
            )
        if not await connection.change("DELETE FROM files WHERE id = ? AND owner = ?", file_id, owner):
            raise _not_found(file_id, field="file_id")

    async def sweep(self) -> int:
        """Deletes expired files and old bytes without a row. Returns the number of files."""
        now_s = self._clock.wall()
        gone, left = await self._delete_expired_rows(now_s)
        return await self._contents.sweep(gone, left, now_s)

    @writes
    async def _delete_expired_rows(self, connection: DatabaseConnection, now_s: float) -> tuple[set[str], set[str]]:
        """Returns the ids of the deleted rows and of all others."""
        await connection.lock("batches")
        gone = await connection.rows(
            "DELETE FROM files WHERE expires_s <= ? AND id NOT IN"
            " (SELECT input_file_id FROM batches WHERE ended_s IS NULL) RETURNING id",
            now_s,
        )
        left = await connection.rows("SELECT id FROM files")
        return {row["id"] for row in gone}, {row["id"] for row in left}


_USED = "SELECT count(*) AS count, CAST(coalesce(sum(size_bytes), 0) AS BIGINT) AS size_bytes FROM files"


def _check_room(used: Row | None, size_bytes: int, *, files_max: float, bytes_max: float) -> None:
    if used is not None and (used["count"] >= files_max or used["size_bytes"] + size_bytes > bytes_max):
        raise OverloadedError("the file store is full; delete some files", reason="files_full", retry_after_s=60.0)


async def insert_file(connection: DatabaseConnection, values: Sequence[object]) -> None:
    """Inserts a row of `files`, in the order of its columns."""
    await connection.change(
        "INSERT INTO files (id, owner, name, purpose, size_bytes, created_s, expires_s) VALUES (?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET owner = excluded.owner, name = excluded.name, purpose = excluded.purpose,"
        " size_bytes = excluded.size_bytes, created_s = excluded.created_s, expires_s = excluded.expires_s",
        *values,
    )


async def read_page(
    connection: DatabaseConnection,
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
        row = await connection.row(f"SELECT created_s, id FROM {table} WHERE id = ? AND owner = ?", after, owner)
        if row is None:
            raise InvalidRequestError(
                f"after must be an id of the list: {after[:64]!r}", field="after", reason="invalid_value"
            )
        place = (row["created_s"], row["id"])
        condition += f" AND (created_s, id) {compare} (?, ?)"
    rows = await connection.rows(
        f"SELECT * FROM {table} WHERE owner = ? AND {condition} ORDER BY created_s {order}, id {order} LIMIT ?",
        owner,
        *values,
        *place,
        limit + 1,
    )
    return rows[:limit], len(rows) > limit


def _not_found(file_id: str, field: str) -> NotFoundError:
    return NotFoundError(f"there is no file {file_id[:64]!r}", field=field, reason="file_not_found")
