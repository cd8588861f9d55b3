"""Stores batches and their leases. Every change to a running batch is fenced by the epoch of its lease."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Row
from typing import Any

import orjson

from kvmesh.clock import Clock
from kvmesh.core import Usage
from kvmesh.errors import InvalidRequestError, NotFoundError, OverloadedError
from services.frontend.settings import BatchSettings
from services.frontend.stores.batch_rows import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    Claim,
)
from services.frontend.stores.database import Connection, Database
from services.frontend.stores.files import insert_file, place_of

_CANCELLABLE = (VALIDATING, IN_PROGRESS)


class LeaseLostError(Exception):
    """Another process holds the lease of the batch now. This one must stop, or lines would run twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one line. `record`: its line of the output or error file, without the line break."""

    line: int
    is_error: bool
    record: bytes
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file on the disk that gets its row when the batch ends."""

    file_id: str
    name: str
    size_bytes: int


class BatchStore:
    """Batches in SQLite, shared by all frontends with the same directory."""

    def __init__(self, database: Database, settings: BatchSettings, clock: Clock, *, instance_id: str) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._instance_id = instance_id

    async def create(
        self,
        owner: str,
        batch_id: str,
        *,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        window_s: float,
        metadata: Mapping[str, str] | None,
        output_ttl_s: float | None,
    ) -> Row:
        """Creates a batch in status validating. Raises OverloadedError if there are too many."""
        now_s = self._clock.wall()
        told = orjson.dumps(metadata).decode() if metadata is not None else None
        values = (batch_id, owner, endpoint, input_file_id, completion_window, told, output_ttl_s, VALIDATING, now_s,
                  now_s + window_s)  # fmt: skip

        def work(connection: Connection) -> Row:
            (count,) = connection.execute("SELECT count(*) FROM batches").fetchone()
            if count >= self._settings.batches_max:
                raise OverloadedError("too many batches", reason="batches_full", retry_after_s=60.0)
            connection.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file_id, completion_window, metadata, output_ttl_s,"
                " status, created_s, expires_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            return _row(connection, batch_id)

        return await self._database.call(work)

    async def get(self, owner: str, batch_id: str) -> Row:
        """Raises NotFoundError if the batch does not exist or belongs to another owner."""

        def work(connection: Connection) -> Row:
            return _owned(connection, owner, batch_id)

        return await self._database.read(work)

    async def page(self, owner: str, *, limit: int, after: str | None) -> tuple[Sequence[Row], bool]:
        """Returns a page, the newest first, and whether more batches follow."""

        def work(connection: Connection) -> list[Row]:
            place = place_of(connection, "batches", owner, after)
            return connection.execute(
                "SELECT * FROM batches WHERE owner = ? AND (? IS NULL OR (created_s, id) < (?, ?))"
                " ORDER BY created_s DESC, id DESC LIMIT ?",
                (owner, place and place[1], *(place or (None, None)), limit + 1),
            ).fetchall()

        rows = await self._database.read(work)
        return rows[:limit], len(rows) > limit

    async def cancel(self, owner: str, batch_id: str) -> Row:
        """Requests cancellation; the holder of the lease ends the batch. Raises InvalidRequestError if it has ended."""
        now_s = self._clock.wall()

        def work(connection: Connection) -> Row:
            row = _owned(connection, owner, batch_id)
            if row["status"] in _CANCELLABLE:
                connection.execute(
                    "UPDATE batches SET status = ?, cancelling_s = ? WHERE id = ?", (CANCELLING, now_s, batch_id)
                )
            elif row["status"] != CANCELLING:
                raise InvalidRequestError(
                    f"a batch that is {row['status']} cannot be cancelled", field="batch_id", reason="batch_ended"
                )
            return _row(connection, batch_id)

        return await self._database.call(work)

    async def claim(self) -> Claim | None:
        """Leases the oldest batch without a lease. Returns None if there is none."""
        now_s = self._clock.wall()

        def work(connection: Connection) -> Row | None:
            found: Row | None = connection.execute(
                "UPDATE batches SET lease_owner = ?, lease_until_s = ?, lease_epoch = lease_epoch + 1 WHERE id ="
                " (SELECT id FROM batches WHERE ended_s IS NULL AND lease_until_s <= ? ORDER BY created_s LIMIT 1)"
                " RETURNING *",
                (self._instance_id, now_s + self._settings.lease_s, now_s),
            ).fetchone()
            return found

        row = await self._database.call(work)
        if row is None:
            return None
        return Claim(
            batch_id=row["id"],
            owner=row["owner"],
            endpoint=row["endpoint"],
            input_file_id=row["input_file_id"],
            status=row["status"],
            is_valid=row["in_progress_s"] is not None,
            epoch=row["lease_epoch"],
            expires_s=row["expires_s"],
            output_ttl_s=row["output_ttl_s"],
        )

    async def renew(self, claim: Claim) -> str:
        """Renews the lease and returns the status, which a client may have changed. Raises LeaseLostError."""
        until_s = self._clock.wall() + self._settings.lease_s

        def work(connection: Connection) -> str:
            _fence(connection, claim)
            connection.execute("UPDATE batches SET lease_until_s = ? WHERE id = ?", (until_s, claim.batch_id))
            return str(_row(connection, claim.batch_id)["status"])

        return await self._database.call(work)

    async def release(self, claim: Claim, *, after_defect: bool = False) -> None:
        """Ends the lease. After a defect the batch waits for one lease time, and fails after `attempts_max` defects."""
        now_s = self._clock.wall()
        until_s = now_s + (self._settings.lease_s if after_defect else 0.0)

        def work(connection: Connection) -> None:
            _fence(connection, claim)
            connection.execute(
                "UPDATE batches SET lease_until_s = ?, defects = defects + ? WHERE id = ?",
                (until_s, int(after_defect), claim.batch_id),
            )
            if _row(connection, claim.batch_id)["defects"] >= self._settings.attempts_max:
                problem = [{"code": "internal", "line": None, "message": "internal error", "param": None}]
                _fail(connection, claim.batch_id, problem, now_s)

        await self._database.call(work)

    async def begin(self, claim: Claim, *, total: int, model: str | None) -> None:
        """Records that the input is valid. A batch that was cancelled meanwhile stays cancelling."""
        now_s = self._clock.wall()

        def work(connection: Connection) -> None:
            _fence(connection, claim)
            connection.execute(
                "UPDATE batches SET total = ?, model = ?, in_progress_s = ? WHERE id = ?",
                (total, model, now_s, claim.batch_id),
            )
            connection.execute(
                "UPDATE batches SET status = ? WHERE id = ? AND status = ?", (IN_PROGRESS, claim.batch_id, VALIDATING)
            )

        await self._database.call(work)

    async def fail(self, claim: Claim, problems: Sequence[Mapping[str, Any]]) -> None:
        """Ends the batch as failed, since its input is not valid."""
        now_s = self._clock.wall()

        def work(connection: Connection) -> None:
            _fence(connection, claim)
            _fail(connection, claim.batch_id, problems, now_s)

        await self._database.call(work)

    async def done_lines(self, claim: Claim) -> set[int]:
        """Returns the lines that have a result, from this process or an earlier one."""

        def work(connection: Connection) -> set[int]:
            rows = connection.execute("SELECT line FROM results WHERE batch_id = ?", (claim.batch_id,)).fetchall()
            return {row["line"] for row in rows}

        return await self._database.read(work)

    async def record(self, claim: Claim, results: Sequence[Result]) -> None:
        """Stores results and updates the counts. A line keeps its first result."""

        def work(connection: Connection) -> None:
            _fence(connection, claim)
            for each in results:
                added = connection.execute(
                    "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)",
                    (claim.batch_id, each.line, int(each.is_error), each.record),
                ).rowcount
                if added:
                    _count(connection, claim.batch_id, each)

        await self._database.call(work)

    async def expire(self, claim: Claim) -> None:
        """Records that the completion window has ended."""
        now_s = self._clock.wall()

        def work(connection: Connection) -> None:
            _fence(connection, claim)
            connection.execute("UPDATE batches SET expired_s = ? WHERE id = ?", (now_s, claim.batch_id))

        await self._database.call(work)

    async def finalise(self, claim: Claim) -> str:
        """Records that all lines have ended and files are written next. Returns the final status of the batch."""
        now_s = self._clock.wall()

        def work(connection: Connection) -> str:
            _fence(connection, claim)
            row = _row(connection, claim.batch_id)
            connection.execute(
                "UPDATE batches SET finalizing_s = coalesce(finalizing_s, ?) WHERE id = ?", (now_s, claim.batch_id)
            )
            if row["cancelling_s"] is not None:
                return CANCELLED  # It stays cancelling until the files are there.
            connection.execute("UPDATE batches SET status = ? WHERE id = ?", (FINALIZING, claim.batch_id))
            return COMPLETED if row["expired_s"] is None else EXPIRED

        return await self._database.call(work)

    async def results(self, claim: Claim, *, after_line: int, is_error: bool, count: int) -> list[tuple[int, bytes]]:
        """Some results in the order of the lines."""

        def work(connection: Connection) -> list[tuple[int, bytes]]:
            rows = connection.execute(
                "SELECT line, record FROM results WHERE batch_id = ? AND line > ? AND is_error = ? ORDER BY line LIMIT ?",
                (claim.batch_id, after_line, int(is_error), count),
            ).fetchall()
            return [(row["line"], row["record"]) for row in rows]

        return await self._database.read(work)

    async def end(self, claim: Claim, status: str, output: OutputFile | None, errors: OutputFile | None) -> None:
        """Ends the batch: adds the rows of its files, which are on the disk, and deletes its results."""
        now_s = self._clock.wall()
        ttl_s = self._settings.file_ttl_s if claim.output_ttl_s is None else claim.output_ttl_s

        def work(connection: Connection) -> None:
            _fence(connection, claim)
            for file in (output, errors):
                if file is not None:
                    values = (
                        file.file_id,
                        claim.owner,
                        file.name,
                        "batch_output",
                        file.size_bytes,
                        now_s,
                        now_s + ttl_s,
                    )
                    insert_file(connection, values)
            connection.execute("DELETE FROM results WHERE batch_id = ?", (claim.batch_id,))
            connection.execute(
                f"UPDATE batches SET status = ?, {status}_s = ?, ended_s = ?, output_file_id = ?, error_file_id = ?,"
                " lease_until_s = 0 WHERE id = ?",
                (status, now_s, now_s, output and output.file_id, errors and errors.file_id, claim.batch_id),
            )

        await self._database.call(work)

    async def sweep(self) -> int:
        """Deletes batches that ended more than `batch_ttl_s` ago. Returns their number."""
        oldest_s = self._clock.wall() - self._settings.batch_ttl_s

        def work(connection: Connection) -> int:
            return connection.execute("DELETE FROM batches WHERE ended_s <= ?", (oldest_s,)).rowcount

        return await self._database.call(work)


def _row(connection: Connection, batch_id: str) -> Row:
    row: Row = connection.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return row


def _owned(connection: Connection, owner: str, batch_id: str) -> Row:
    row: Row | None = connection.execute(
        "SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no batch {batch_id[:64]!r}", field="batch_id", reason="batch_not_found")
    return row


def _fence(connection: Connection, claim: Claim) -> None:
    row = connection.execute("SELECT lease_epoch, ended_s FROM batches WHERE id = ?", (claim.batch_id,)).fetchone()
    if row is None or row["lease_epoch"] != claim.epoch or row["ended_s"] is not None:
        raise LeaseLostError(claim.batch_id)


def _fail(connection: Connection, batch_id: str, problems: Sequence[Mapping[str, Any]], now_s: float) -> None:
    connection.execute("DELETE FROM results WHERE batch_id = ?", (batch_id,))
    connection.execute(
        "UPDATE batches SET status = ?, failed_s = ?, ended_s = ?, errors = ?, lease_until_s = 0 WHERE id = ?",
        (FAILED, now_s, now_s, orjson.dumps(list(problems)).decode(), batch_id),
    )


def _count(connection: Connection, batch_id: str, result: Result) -> None:
    usage = result.usage
    connection.execute(
        "UPDATE batches SET completed = completed + ?, failed = failed + ?, input_tokens = input_tokens + ?,"
        " cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?,"
        " reasoning_tokens = reasoning_tokens + ? WHERE id = ?",
        (int(not result.is_error), int(result.is_error), usage.prompt_tokens, usage.cached_tokens,
         usage.output_tokens, usage.reasoning_tokens, batch_id),
    )  # fmt: skip
