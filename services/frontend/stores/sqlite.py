"""Runs SQLite in its own thread, so that the event loop never waits for the disk."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kvmesh.errors import InvalidRequestError, UnavailableError
from services.frontend.stores.database import DISK_FULL, DISK_FULL_RETRY_S, DatabaseConnection, Row, WaitingCalls

T = TypeVar("T")
_PRIMARY_CODE = 0xFF
"""The bits of an extended error code that hold the primary one."""


class SqliteConnection:
    """A connection whose methods block and never suspend: a transaction runs to its end in the database's thread."""

    row_lock = ""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def row(self, statement: str, *values: object) -> Row | None:
        row: Row | None = self._connection.execute(statement, values).fetchone()
        return row

    async def rows(self, statement: str, *values: object) -> list[Row]:
        return self._connection.execute(statement, values).fetchall()

    async def change(self, statement: str, *values: object) -> int:
        return self._connection.execute(statement, values).rowcount

    async def lock(self, name: str) -> None:
        """Nothing to do: a transaction that writes locks the whole file."""


class SqliteDatabase:
    """One file, one connection, one thread. Several processes of one machine may share the file.

    `migrations[i]` is the script from schema version i to i + 1; a file of a later version is refused.
    """

    clock_offset_s = 0.0

    def __init__(self, path: Path, migrations: Sequence[str], *, busy_timeout_s: float) -> None:
        self._path = path
        self._migrations = migrations
        self._busy_timeout_s = busy_timeout_s
        self._waiting = WaitingCalls()
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Creates or migrates the file. Raises UnavailableError with the reason if it cannot be used."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"database-{self._path.stem}")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._open)

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The file holds conversations; other users of the machine must not read it.
            self._path.touch(mode=0o600)
            # `isolation_level=None`: no implicit transactions, because `_run` begins and ends them.
            connection = sqlite3.connect(
                self._path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
            )
            connection.execute("PRAGMA journal_mode=WAL")
            # With WAL, a power failure can lose the newest transactions, but not the consistency (sqlite.org/pragma.html#pragma_synchronous).
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA foreign_keys=ON")
            self._migrate(connection)
            connection.row_factory = _named
        except (OSError, sqlite3.Error) as error:
            raise UnavailableError(f"{self._path} cannot be used: {error}", reason="store_unavailable") from error
        self._connection = connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > len(self._migrations):
                raise UnavailableError(
                    f"{self._path} was written by a later version of this program", reason="store_too_new"
                )
            for script in self._migrations[version:]:
                # Triggers contain single semicolons. `executescript` would commit the transaction first.
                for statement in script.split(";;"):
                    if statement.strip():
                        connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(self._migrations)}")
        except BaseException:
            connection.execute("ROLLBACK")
            connection.close()
            raise
        connection.execute("COMMIT")

    async def call(
        self, work: Callable[[DatabaseConnection], Coroutine[Any, Any, T]], is_read_only: bool, *, owner: str = ""
    ) -> T:
        """See Database.call. Work that only reads does not wait for writers."""
        thread = self._thread
        if thread is None:
            raise UnavailableError("the store is closed", reason="store_unavailable")
        self._waiting.enter(owner)
        future = asyncio.get_running_loop().run_in_executor(thread, self._run, work, is_read_only)
        future.add_done_callback(lambda _: self._waiting.leave(owner))
        return await future

    def _run(self, work: Callable[[DatabaseConnection], Coroutine[Any, Any, T]], is_read_only: bool) -> T:
        connection = self._connection
        if connection is None:
            raise UnavailableError("the store is closed", reason="store_unavailable")
        try:
            connection.execute("BEGIN" if is_read_only else "BEGIN IMMEDIATE")
            try:
                result = _complete(work(SqliteConnection(connection)))
                connection.execute("COMMIT")
            except BaseException:
                # SQLite itself has ended the transaction if the disk is full. An open transaction would fail all later calls.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except UnicodeEncodeError as error:
            # Header and form bytes that are not UTF-8 arrive as surrogates.
            raise InvalidRequestError("a text has characters that cannot be stored") from error
        except sqlite3.Error as error:
            raise _unavailable(error) from error
        return result

    async def aclose(self) -> None:
        """Waits for running calls and closes the file. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, self._close)
            thread.shutdown(wait=False)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _unavailable(error: sqlite3.Error) -> UnavailableError:
    if getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE == sqlite3.SQLITE_FULL:
        return UnavailableError(f"the store failed: {error}", reason=DISK_FULL, retry_after_s=DISK_FULL_RETRY_S)
    return UnavailableError(f"the store failed: {error}", reason="store_unavailable", retry_after_s=1.0)


def _named(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> Row:
    return {column[0]: value for column, value in zip(cursor.description, values, strict=True)}


def _complete(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that awaits only methods of SqliteConnection, which never suspend."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    work.close()
    raise TypeError("a transaction awaited something other than its connection")
