"""Runs transactions on PostgreSQL, which frontends on several machines share. Imported only where `stores.url` is set."""

import asyncio
import logging
import math
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, UnavailableError
from kvmesh.event_log import event_logger
from kvmesh.identity.secret import read_private
from services.frontend.settings import StoresSettings
from services.frontend.stores.database import DatabaseConnection, Row, WaitingCalls

T = TypeVar("T")
Work = Callable[[DatabaseConnection], Coroutine[Any, Any, T]]
Raw = psycopg.AsyncConnection[dict[str, Any]]
_log = event_logger(__name__)
_SCHEMA_LOCK = 0x6B766D65  # The key of the lock under which one process at a time migrates; "kvme".
_PAUSE_S_MAX = 0.5
_REPEAT_S = 60.0
AWAY_TIMEOUT_S = 1.0
"""Longest duration of a call while the database cannot be reached, so that requests that need it fail soon."""
SILENCE_S = 1.0
"""Time after `timeout_s` after which a connection without an answer is cut."""
CONNECTION_AGE_S_MAX = 600.0
"""Age at which a connection is replaced: it measures the database's clock and spreads after a failover."""


class _Repeated(logging.Filter):
    """Drops a message that is the same as the one before: the pool reports each attempt to connect, with PostgreSQL's reason."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ("", -_REPEAT_S)

    def filter(self, record: logging.LogRecord) -> bool:
        message, last_s = self._last
        if record.getMessage() == message and record.created - last_s < _REPEAT_S:
            return False
        self._last = (record.getMessage(), record.created)
        return True


logging.getLogger("psycopg.pool").addFilter(_Repeated())


class PostgresConnection:
    """A transaction on one connection."""

    row_lock = " FOR UPDATE"

    def __init__(self, connection: Raw) -> None:
        self._connection = connection

    async def row(self, statement: str, *values: object) -> Row | None:
        return await (await self._execute(statement, values)).fetchone()

    async def rows(self, statement: str, *values: object) -> list[Row]:
        rows: list[Row] = [*await (await self._execute(statement, values)).fetchall()]
        return rows

    async def change(self, statement: str, *values: object) -> int:
        return (await self._execute(statement, values)).rowcount

    async def lock(self, name: str) -> None:
        await self._execute("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (name,))

    async def _execute(self, statement: str, values: Sequence[object]) -> psycopg.AsyncCursor[dict[str, Any]]:
        # No statement of the stores has a question mark or a percent sign in a literal.
        # As bytes, because psycopg's type of a query excludes computed texts.
        return await self._connection.execute(statement.replace("?", "%s").encode(), values, binary=True)


class PostgresDatabase:
    """A pool of connections to one database.

    A call waits at most `timeout_s`, even if the server does not answer. A transaction runs again if its connection was lost or
    PostgreSQL ended it because of a deadlock. While the server is unreachable, calls fail after AWAY_TIMEOUT_S, and the pool reconnects
    automatically. Several parts may use one database; it closes with the last.
    """

    def __init__(self, settings: StoresSettings, migrations: Sequence[str], clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._migrations = migrations
        self._waiting = WaitingCalls()
        self._users = 0
        self._pool: AsyncConnectionPool[Raw] | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._migrating = asyncio.Lock()
        self._is_migrated = False
        self._is_away = False
        self.clock_offset_s = 0.0

    async def open(self) -> None:
        """Connects and migrates. Does not fail if the server is unreachable: calls fail until it is back.

        Raises UnavailableError if a later version of this program wrote the tables, InvalidRequestError if the password file cannot be read.
        """
        # Raises before there is a pool if the password file cannot be read.
        self._conninfo()
        self._users += 1
        if self._pool is not None:
            return
        settings = self._settings
        self._pool = AsyncConnectionPool(
            self._conninfo,
            connection_class=psycopg.AsyncConnection[dict[str, Any]],
            # `_once` alone begins and ends transactions.
            kwargs={"autocommit": True, "row_factory": dict_row},
            min_size=1,
            max_size=settings.connections_max,
            open=False,
            configure=self._measure_clock,
            timeout=settings.timeout_s,
            max_lifetime=CONNECTION_AGE_S_MAX,
            # The pool then gives up the attempt, and the next call starts another, so that no pause gets long.
            reconnect_timeout=2.0,
            name="stores",
        )
        await self._pool.open(wait=False)
        try:
            await self.call(_nothing, is_read_only=True)
        except UnavailableError as error:
            if error.reason == "store_too_new":
                raise
            _log.warning("stores_not_ready", detail=error.message)

    def _conninfo(self) -> str:
        """Returns the parameters of a new connection. Reads the password each time, so that it can be replaced."""
        settings = self._settings
        milliseconds = math.ceil(settings.timeout_s * 1000)
        # The operator's own, such as a search path, come last and count.
        options = conninfo_to_dict(settings.url).get("options") or ""
        given: dict[str, Any] = {
            "application_name": "kvmesh-frontend",
            # psycopg returns bytes for texts of a database that was made without a locale (SQL_ASCII).
            "client_encoding": "UTF8",
            "connect_timeout": max(2, math.ceil(settings.timeout_s)),
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": milliseconds,
            "options": f"-c statement_timeout={milliseconds} -c lock_timeout={milliseconds}"
            f" -c idle_in_transaction_session_timeout={milliseconds} {options}",
        }
        if settings.password_file:
            path = str(Path(settings.password_file).expanduser())
            given["password"] = read_private(path, field="stores.password_file").decode()
        return make_conninfo(settings.url, **given)

    async def _measure_clock(self, connection: Raw) -> None:
        began_s = self._clock.wall()
        row = await (
            await connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8 AS now_s")
        ).fetchone()
        assert row is not None
        # The database read its clock in the middle of the call, if both directions took the same time.
        self.clock_offset_s = float(row["now_s"]) - (began_s + self._clock.wall()) / 2

    async def call(self, work: Work[T], is_read_only: bool, *, owner: str = "") -> T:
        """See Database.call."""
        if self._pool is None:
            raise UnavailableError("the store is closed", reason="store_unavailable")
        self._waiting.enter(owner)
        task = asyncio.create_task(self._run(work, is_read_only), name="store-call")
        self._running.add(task)

        def on_done(ended: "asyncio.Task[Any]") -> None:
            self._running.discard(ended)
            self._waiting.leave(owner)
            if not ended.cancelled():
                # Its caller may have been cancelled, and asyncio warns of exceptions that were never retrieved.
                ended.exception()

        task.add_done_callback(on_done)
        # A cancelled caller does not interrupt the transaction: see Database.
        return await asyncio.shield(task)

    async def _run(self, work: Work[T], is_read_only: bool) -> T:
        """Repeats the transaction until it has run or its time is over."""
        loop = asyncio.get_running_loop()
        settings = self._settings
        until_s = loop.time() + (AWAY_TIMEOUT_S if self._is_away else settings.timeout_s)
        pause_s = 0.02
        while True:
            try:
                result = await self._once(work, is_read_only, until_s)
            except (psycopg.DataError, UnicodeEncodeError) as error:
                raise InvalidRequestError("a text has characters that cannot be stored") from error
            except psycopg.Error as error:
                if not _may_repeat(error) or loop.time() + pause_s >= until_s:
                    raise self._failure(error) from error
            except OSError as error:
                raise self._failure(error) from error
            else:
                if self._is_away:
                    self._is_away = False
                    _log.info("stores_back")
                return result
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _once(self, work: Work[T], is_read_only: bool, until_s: float) -> T:
        pool, loop = self._pool, asyncio.get_running_loop()
        if pool is None:
            raise UnavailableError("the store is closed", reason="store_unavailable")
        connection = await pool.getconn(timeout=max(0.001, until_s - loop.time()))
        # PostgreSQL's own time-outs end a slow statement. This one is for a server or a network that is silent.
        watchdog = loop.call_at(until_s + SILENCE_S, _cut, connection)
        try:
            if not self._is_migrated:
                await self._migrate(connection)
            # Autocommit: each statement sees the newest committed rows.
            if is_read_only:
                return await work(PostgresConnection(connection))
            async with connection.transaction():
                return await work(PostgresConnection(connection))
        except psycopg.errors.ReadOnlySqlTransaction:
            # The server is a standby now. Another connection may find the new primary.
            await connection.close()
            raise
        finally:
            watchdog.cancel()
            await pool.putconn(connection)

    def _failure(self, error: Exception) -> UnavailableError:
        if not self._is_away and _is_away(error):
            self._is_away = True
            _log.warning("stores_away", detail=_words(error))
        return UnavailableError(f"the store failed: {_words(error)}", reason="store_unavailable", retry_after_s=1.0)

    async def _migrate(self, connection: Raw) -> None:
        """Migrates the tables to this version. If several processes start at the same time, one migrates and the others wait."""
        async with self._migrating:
            if self._is_migrated:
                return
            async with connection.transaction():
                await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))
                await connection.execute("CREATE TABLE IF NOT EXISTS kvmesh_schema (version BIGINT NOT NULL)")
                row = await (await connection.execute("SELECT max(version) AS version FROM kvmesh_schema")).fetchone()
                version = (row and row["version"]) or 0
                if version > len(self._migrations):
                    raise UnavailableError(
                        f"the tables have version {version} of a later release; this one knows {len(self._migrations)}",
                        reason="store_too_new",
                    )
                for script in self._migrations[version:]:
                    for statement in script.split(";;"):
                        await connection.execute(statement.encode())
                if version < len(self._migrations):
                    await connection.execute("INSERT INTO kvmesh_schema VALUES (%s)", (len(self._migrations),))
            self._is_migrated = True

    async def aclose(self) -> None:
        """Waits for running calls and closes the pool, when every part that opened it has closed it."""
        self._users -= 1
        if self._users > 0:
            return
        pool = self._pool
        if self._running:
            await asyncio.wait(self._running)
        self._pool = None
        if pool is not None:
            await pool.close(timeout=SILENCE_S)


async def _nothing(_: DatabaseConnection) -> None:
    """The transaction of a call that only connects and migrates."""


def _may_repeat(error: psycopg.Error) -> bool:
    """Returns whether the transaction changed nothing, or may have been committed on a connection that was lost."""
    repeated = (
        psycopg.errors.SerializationFailure,
        psycopg.errors.DeadlockDetected,
        psycopg.errors.ReadOnlySqlTransaction,
    )
    return isinstance(error, repeated) or _is_away(error)


def _is_away(error: Exception) -> bool:
    """Returns whether the server cannot be reached: errors of the connection have no code, or one of these classes."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    code = error.sqlstate or ""
    # 08: connection exceptions. 57P01 to 57P03: the server stops, has crashed or starts. 53300: it has no free connection.
    return not code or code.startswith("08") or code in ("57P01", "57P02", "57P03", "53300")


def _cut(connection: Raw) -> None:
    """Ends whatever waits for this connection, with an error."""
    # A copy of the descriptor: psycopg closes its own one later.
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.pgconn.socket)) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def _words(error: Exception) -> str:
    """Returns the error's text without addresses and values, which clients must not see."""
    if isinstance(error, psycopg.Error) and error.sqlstate:
        return f"{type(error).__name__} ({error.sqlstate})"
    return type(error).__name__
