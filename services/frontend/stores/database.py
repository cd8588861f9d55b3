"""The storage interface of the frontend: stores are written against it once and run on SQLite and on PostgreSQL."""

import os
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvmesh.clock import Clock
from kvmesh.errors import OverloadedError

T = TypeVar("T")
P = ParamSpec("P")
Row = Mapping[str, Any]
"""A row by the names of its columns."""
DISK_FULL = "disk_full"
"""Reason of the UnavailableError of a write that found no room on the disk. What was stored before stays readable."""
DISK_FULL_RETRY_S = 30.0
"""Somebody has to make room first."""
CALLS_MAX = 1024
"""Calls that may wait for a database; more are refused with Retry-After."""


class DatabaseConnection(Protocol):
    """One transaction. Statements are in the SQL that SQLite and PostgreSQL share, with `?` for each value."""

    row_lock: str
    """Ends a SELECT whose rows no other transaction may change before this one ends. Empty where transactions that write are serial."""

    async def row(self, statement: str, *values: object) -> Row | None:
        """Returns the first row."""
        ...

    async def rows(self, statement: str, *values: object) -> list[Row]:
        """Returns all rows."""
        ...

    async def change(self, statement: str, *values: object) -> int:
        """Returns the number of rows that the statement changed."""
        ...

    async def lock(self, name: str) -> None:
        """Waits until no other transaction has locked `name`, and locks it until this one ends."""
        ...


class Database(Protocol):
    """Runs transactions.

    1. A transaction that ends with an exception changes nothing.
    2. A cancelled call that has begun still finishes; its result is dropped.
    3. A transaction that writes may run again after the connection was lost while it committed, so it must have the same effect
       when it runs twice.
    """

    clock_offset_s: float
    """The database's time less this process's wall clock. All processes that share a database agree on its time."""

    async def open(self) -> None:
        """Creates or migrates the tables. Raises UnavailableError with the reason if the database cannot be used."""
        ...

    async def call(
        self, work: Callable[[DatabaseConnection], Coroutine[Any, Any, T]], is_read_only: bool, *, owner: str = ""
    ) -> T:
        """Runs `work` in one transaction; it awaits only methods of the connection.

        Raises OverloadedError if too many calls wait, UnavailableError if the database is closed or fails. The calls of one owner may be
        half of those that wait.
        """
        ...

    async def aclose(self) -> None:
        """Waits for running calls and closes. Idempotent."""
        ...


class WaitingCalls:
    """Counts the calls that wait for a database, of all owners and of each."""

    def __init__(self) -> None:
        self._count = 0
        self._by_owner: Counter[str] = Counter()

    def enter(self, owner: str) -> None:
        """Adds a call. Raises OverloadedError if there are too many."""
        if self._count >= CALLS_MAX or (owner and self._by_owner[owner] >= CALLS_MAX // 2):
            raise OverloadedError("too many calls wait for the store", reason="store_full", retry_after_s=1.0)
        self._count += 1
        self._by_owner[owner] += 1

    def leave(self, owner: str) -> None:
        """Removes a call."""
        self._count -= 1
        self._by_owner[owner] -= 1
        if not self._by_owner[owner]:
            del self._by_owner[owner]


class StoreClock:
    """A clock with the database's wall time, so that leases end at the same moment for all machines."""

    def __init__(self, clock: Clock, database: Database) -> None:
        self._clock = clock
        self._database = database

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._clock.wall() + self._database.clock_offset_s

    async def sleep(self, delay_s: float) -> None:
        await self._clock.sleep(delay_s)


class Store(Protocol):
    """An object with methods that are transactions."""

    database: Database


S = TypeVar("S", bound=Store)
Method = Callable[Concatenate[S, DatabaseConnection, P], Coroutine[Any, Any, T]]
AsyncMethod = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def reads(method: Method[S, P, T]) -> AsyncMethod[S, P, T]:
    """Decorates a method that only reads: its callers leave out the connection.

    The argument `owner`, or a string as the first argument, is the owner whose data the method reads. On PostgreSQL each statement of
    the method sees what is committed when it starts.
    """
    return _transaction(method, is_read_only=True)


def writes(method: Method[S, P, T]) -> AsyncMethod[S, P, T]:
    """Does what `reads` does for a method that writes, in one transaction."""
    return _transaction(method, is_read_only=False)


def _transaction(method: Method[S, P, T], *, is_read_only: bool) -> AsyncMethod[S, P, T]:
    @wraps(method)
    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        given = kwargs.get("owner") or (args[0] if args else "")
        owner = given if isinstance(given, str) else ""
        # A function, not a coroutine: each attempt needs a coroutine of its own.
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
