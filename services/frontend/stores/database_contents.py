"""The bytes of files in the shared database, in parts of 1 MiB. This machine's directory holds files only while they are in use."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from uuid import uuid4

from kvmesh.clock import Clock
from services.frontend.stores.contents import NewFile, sweep_directory
from services.frontend.stores.database import Database, DatabaseConnection, Row, reads, writes

_PART_BYTES = 1 << 20
_STALE_S = 86_400.0


class DatabaseContents:
    """Each part is a transaction of its own, so that a large file holds no connection and no lock for long."""

    def __init__(self, database: Database, directory: Path, clock: Clock) -> None:
        self.database = database
        self._directory = directory
        self._clock = clock

    async def start(self) -> None:
        await asyncio.to_thread(self._directory.mkdir, parents=True, exist_ok=True, mode=0o700)

    def new(self, file_id: str) -> NewFile:
        # A name of its own: another process of this machine may write the same output of a batch.
        return NewFile(self._directory / f"{file_id}.{uuid4().hex}", file_id)

    async def keep(self, file: NewFile) -> None:
        """Stores the parts and deletes the local file."""
        source = await asyncio.to_thread(file.path.open, "rb")
        try:
            for part in count():
                data = await asyncio.to_thread(source.read, _PART_BYTES)
                # A file of exactly n parts gets an empty part at its end.
                is_last = len(data) < _PART_BYTES
                await self._store(file_id=file.file_id, part=part, is_last=is_last, data=data)
                if is_last:
                    return
        finally:
            await asyncio.shield(asyncio.to_thread(source.close))
            await asyncio.shield(asyncio.to_thread(file.path.unlink, missing_ok=True))

    @writes
    async def _store(
        self, connection: DatabaseConnection, *, file_id: str, part: int, is_last: bool, data: bytes
    ) -> None:
        await connection.change(
            "INSERT INTO contents (file_id, part, is_last, stored_s, data) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (file_id, part) DO UPDATE"
            " SET is_last = excluded.is_last, stored_s = excluded.stored_s, data = excluded.data",
            file_id,
            part,
            int(is_last),
            self._clock.wall(),
            data,
        )

    def path(self, file_id: str) -> Path | None:
        """Returns None: the bytes are in the database."""

    @asynccontextmanager
    async def local(self, file_id: str) -> AsyncIterator[Path]:
        """Copies the bytes to this machine and deletes the copy at the end."""
        copy = self.new(file_id)
        try:
            async for data in self.read(file_id):
                await asyncio.to_thread(copy.write, data)
            await asyncio.to_thread(copy.commit)
            yield copy.path
        finally:
            await asyncio.shield(asyncio.to_thread(copy.discard))
            await asyncio.shield(asyncio.to_thread(copy.path.unlink, missing_ok=True))

    async def read(self, file_id: str) -> AsyncIterator[bytes]:
        for part in count():
            row = await self._part(file_id=file_id, part=part)
            if row is None:
                # Never stored, or deleted since the first part.
                raise FileNotFoundError(file_id)
            yield row["data"]
            if row["is_last"]:
                return

    @reads
    async def _part(self, connection: DatabaseConnection, *, file_id: str, part: int) -> Row | None:
        return await connection.row("SELECT is_last, data FROM contents WHERE file_id = ? AND part = ?", file_id, part)

    @writes
    async def remove(self, connection: DatabaseConnection, file_ids: Collection[str]) -> None:
        for file_id in file_ids:
            await connection.change("DELETE FROM contents WHERE file_id = ?", file_id)

    async def sweep(self, gone: set[str], left: set[str], now_s: float) -> int:
        """Deletes bytes in the database, and files that a killed process left in this machine's directory."""
        await self.remove(sorted(gone))
        await self._remove_stale(now_s)
        await asyncio.to_thread(sweep_directory, self._directory, set(), set(), now_s=now_s)
        return len(gone)

    @writes
    async def _remove_stale(self, connection: DatabaseConnection, now_s: float) -> None:
        await connection.change(
            "DELETE FROM contents WHERE stored_s < ? AND NOT EXISTS (SELECT 1 FROM files WHERE files.id = contents.file_id)",
            now_s - _STALE_S,
        )
