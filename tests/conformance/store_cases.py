"""The databases that the conformance suite of the stores runs on."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvmesh.clock import Clock, SystemClock
from services.frontend.settings import StoresSettings
from services.frontend.stores import batch_rows, postgres_schema, responses
from services.frontend.stores.contents import DirectoryContents, FileContents
from services.frontend.stores.database import Database
from services.frontend.stores.database_contents import DatabaseContents
from services.frontend.stores.postgres import PostgresDatabase
from services.frontend.stores.sqlite import SqliteDatabase
from tests.postgres import PASSWORD, Cluster, postgres_cluster


@dataclass(slots=True)
class StoreCase:
    """One data set, empty at first. Each call of a method returns the objects of another process. `url`: empty for SQLite."""

    directory: Path
    url: str
    stack: AsyncExitStack
    opened: list[Database] = field(default_factory=list)

    async def batches(self) -> Database:
        """Opens a database with the tables of files and batches."""
        return await self._open("batches.sqlite", batch_rows.MIGRATIONS)

    async def responses(self) -> Database:
        """Opens a database with the tables of responses."""
        return await self._open("responses.sqlite", responses.MIGRATIONS)

    async def _open(self, name: str, migrations: tuple[str, ...]) -> Database:
        database: Database
        if self.url:
            database = PostgresDatabase(
                stores_settings(self.directory, self.url), postgres_schema.MIGRATIONS, SystemClock()
            )
        else:
            database = SqliteDatabase(self.directory / name, migrations, busy_timeout_s=60.0)
        await database.open()
        self.stack.push_async_callback(database.aclose)
        self.opened.append(database)
        return database

    def contents(self, database: Database, clock: Clock) -> FileContents:
        """Returns the store for the bytes of files. With PostgreSQL each process has a directory of its own."""
        if not self.url:
            return DirectoryContents(self.directory / "files")
        return DatabaseContents(database, self.directory / f"files-{self.opened.index(database)}", clock)


def stores_settings(directory: Path, url: str) -> StoresSettings:
    """Returns settings with a password file, and a timeout long enough for a busy machine."""
    password = directory / "password"
    password.write_text(f"{PASSWORD}\n")
    return StoresSettings(url=url, password_file=str(password), timeout_s=30.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One server for a module. Tests that stop it start it again."""
    with postgres_cluster() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgres"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StoreCase]:
    """An empty data set on each kind of database."""
    url = ""
    if request.param == "postgres":
        server: Cluster = request.getfixturevalue("cluster")
        url = await asyncio.to_thread(server.new_database)
    async with AsyncExitStack() as stack:
        yield StoreCase(tmp_path, url, stack)
