"""Runs SQLite in its own thread, so that the event loop never waits for the disk."""

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvmesh.errors import OverloadedError, UnavailableError

T = TypeVar("T")
P = ParamSpec("P")
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
        self._calls_by_owner: Counter[str] = Counter()
        self._thread: ThreadPoolExecutor | None = None
        self._connection: Connection | None = None

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

    async def call(self, work: Callable[[Connection], T], is_read_only: bool, *, owner: str = "") -> T:
        """Runs `work` in the thread inside one transaction. Work that only reads does not wait for writers.

        Raises OverloadedError if too many calls wait, UnavailableError if the file is closed or fails. The calls of one owner may be half
        of those that wait.
        """
        thread = self._thread
        if thread is None:
            raise UnavailableError("the store is closed", reason="store_unavailable")
        of_owner = self._calls_by_owner[owner]
        if self._calls >= self._calls_max or (owner and of_owner >= self._calls_max // 2):
            raise OverloadedError("too many calls wait for the store", reason="store_full", retry_after_s=1.0)
        self._calls += 1
        self._calls_by_owner[owner] += 1
        future = asyncio.get_running_loop().run_in_executor(thread, self._run, work, is_read_only)
        future.add_done_callback(partial(self._on_done, owner))
        return await future

    def _on_done(self, owner: str, future: "asyncio.Future[Any]") -> None:
        self._calls -= 1
        self._calls_by_owner[owner] -= 1
        if not self._calls_by_owner[owner]:
            del self._calls_by_owner[owner]

    def _run(self, work: Callable[[Connection], T], is_read_only: bool) -> T:
        connection = self._connection
        if connection is None:
            raise UnavailableError("the store is closed", reason="store_unavailable")
        try:
            connection.execute("BEGIN" if is_read_only else "BEGIN IMMEDIATE")
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


class Store(Protocol):
    """An object with methods that are transactions."""

    database: Database


S = TypeVar("S", bound=Store)
Method = Callable[Concatenate[S, Connection, P], T]
AsyncMethod = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def reads(method: Method[S, P, T]) -> AsyncMethod[S, P, T]:
    """Decorates a method that only reads. It runs in the store's database thread inside one transaction; callers await it.

    If the first argument is a string, it is the owner whose data the method reads.
    """
    return _transaction(method, is_read_only=True)


def writes(method: Method[S, P, T]) -> AsyncMethod[S, P, T]:
    """As `reads`, for a method that writes."""
    return _transaction(method, is_read_only=False)


def _transaction(method: Method[S, P, T], *, is_read_only: bool) -> AsyncMethod[S, P, T]:
    @wraps(method)
    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        owner = args[0] if args and isinstance(args[0], str) else ""
        return await self.database.call(
            lambda connection: method(self, connection, *args, **kwargs), is_read_only, owner=owner
        )

    return run


def state_directory(given: str) -> Path:
    """Returns the given directory, else $XDG_STATE_HOME/kvmesh, else ~/.local/state/kvmesh."""
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path("~/.local/state").expanduser()) / "kvmesh"
