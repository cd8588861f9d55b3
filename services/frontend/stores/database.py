"""Runs SQLite in its own thread, so that the event loop never waits for the disk."""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kvmesh.errors import OverloadedError, UnavailableError

T = TypeVar("T")
Connection = sqlite3.Connection


class Database:
    """One file, one connection, one thread. Several processes may share the file.

    `migrations[i]` is the script from schema version i to i + 1; a file of a later version is refused. Each call is one
    transaction. A cancelled call that has begun still finishes; its result is dropped.
    """

    def __init__(self, path: Path, migrations: Sequence[str], *, busy_timeout_s: float, calls_max: int) -> None:
        self._path = path
        self._migrations = migrations
        self._busy_timeout_s = busy_timeout_s
        self._calls_max = calls_max
        self._calls = 0
        self._thread: ThreadPoolExecutor | None = None
        self._connection: Connection | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    async def open(self) -> None:
        """Creates or migrates the file. Raises UnavailableError with the reason if it cannot be used."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"database-{self._path.stem}")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._open)

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The file holds conversations; other users of the machine must not read it.
            self._path.touch(mode=0o600)
            connection = sqlite3.connect(
                self._path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
            )
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA foreign_keys=ON")
            self._migrate(connection)
        except (OSError, sqlite3.Error) as error:
            raise UnavailableError(f"{self._path} cannot be used: {error}", reason="store_unavailable") from error
        self._connection = connection

    def _migrate(self, connection: Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > len(self._migrations):
                raise UnavailableError(
                    f"{self._path} was written by a later version of this program", reason="store_too_new"
                )
            for script in self._migrations[version:]:
                for statement in script.split(";;"):
                    if statement.strip():
                        connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(self._migrations)}")
        except BaseException:
            connection.execute("ROLLBACK")
            connection.close()
            raise
        connection.execute("COMMIT")

    async def read(self, work: Callable[[Connection], T]) -> T:
        """As `call`, for work that only reads. Does not wait for writers."""
        return await self.call(work, begin="BEGIN")

    async def call(self, work: Callable[[Connection], T], *, begin: str = "BEGIN IMMEDIATE") -> T:
        """Runs `work` in the thread inside one transaction.

        Raises OverloadedError if too many calls wait, UnavailableError if the file is closed or fails.
        """
        thread = self._thread
        if thread is None:
            raise UnavailableError("the store is closed", reason="store_unavailable")
        if self._calls >= self._calls_max:
            raise OverloadedError("too many calls wait for the store", reason="store_full", retry_after_s=1.0)
        self._calls += 1
        future = asyncio.get_running_loop().run_in_executor(thread, self._run, work, begin)
        future.add_done_callback(self._on_done)
        return await future

    def _on_done(self, future: "asyncio.Future[T]") -> None:
        self._calls -= 1

    def _run(self, work: Callable[[Connection], T], begin: str) -> T:
        connection = self._connection
        if connection is None:
            raise UnavailableError("the store is closed", reason="store_unavailable")
        try:
            connection.execute(begin)
            try:
                result = work(connection)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise UnavailableError(
                f"the store failed: {error}", reason="store_unavailable", retry_after_s=1.0
            ) from error
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


def state_directory(given: str) -> Path:
    """Returns the given directory, else $XDG_STATE_HOME/kvmesh, else ~/.local/state/kvmesh."""
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path("~/.local/state").expanduser()) / "kvmesh"
