"""Stores batches and their leases. Every change to a running batch is fenced by the epoch of its lease."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    OUTPUT_PURPOSE,
    VALIDATING,
    Claim,
)
from services.frontend.stores.database import Database, DatabaseConnection, Row, reads, writes
from services.frontend.stores.files import TENANT_SHARE, insert_file, read_page

DEFECTS_MAX = 3
"""Defects of one batch, after which it fails: a batch that breaks one frontend breaks the next."""
_CANCELLABLE = (VALIDATING, IN_PROGRESS)
_WAITS = "ended_s IS NULL AND lease_until_s <= ?"


class LeaseLostError(Exception):
    """Another process holds the lease of the batch now. This one must stop, or lines would run twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """The result of one line. `record`: its line of the output or error file, without the line break."""

    line: int
    is_error: bool
    record: bytes
    usage: Usage
    is_unrun: bool = False
    """The batch ended before the line was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file on the disk that gets its row when the batch ends."""

    file_id: str
    name: str
    size_bytes: int


class BatchStore:
    """Batches, shared by all frontends with the same directory or database."""

    def __init__(self, database: Database, settings: BatchSettings, clock: Clock, *, instance_id: str) -> None:
        self.database = database
        self._settings = settings
        self._clock = clock
        self._instance_id = instance_id

    def wall(self) -> float:
        """Returns the time on which all that share the batches agree."""
        return self._clock.wall()

    @writes
    async def create(
        self,
        connection: DatabaseConnection,
        *,
        owner: str,
        batch_id: str,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        window_s: float,
        metadata: Mapping[str, str] | None,
        output_ttl_s: float | None,
    ) -> Row:
        """Creates a batch in status validating. Raises OverloadedError if there are too many."""
        await connection.lock("batches")
        if (
            row := await connection.row("SELECT * FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        ) is not None:
            return row  # The transaction runs again.
        count = await _count_of(connection, "SELECT count(*) AS count FROM batches")
        own = await _count_of(connection, "SELECT count(*) AS count FROM batches WHERE owner = ?", owner)
        most = self._settings.batches_max
        if count >= most or (owner and own >= most * TENANT_SHARE):
            raise OverloadedError("too many batches", reason="batches_full", retry_after_s=60.0)
        metadata_text = orjson.dumps(metadata).decode() if metadata is not None else None
        now_s = self._clock.wall()
        await connection.change(
            "INSERT INTO batches (id, owner, endpoint, input_file_id, completion_window, metadata, output_ttl_s,"
            " status, created_s, expires_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            batch_id, owner, endpoint, input_file_id, completion_window, metadata_text, output_ttl_s, VALIDATING, now_s,
            now_s + window_s,
        )  # fmt: skip
        return await _row(connection, batch_id)

    @reads
    async def get(self, connection: DatabaseConnection, *, owner: str, batch_id: str) -> Row:
        """Returns a batch. Raises NotFoundError if it does not exist or belongs to another owner."""
        return await _owned(connection, owner=owner, batch_id=batch_id)

    @reads
    async def page(
        self,
        connection: DatabaseConnection,
        owner: str,
        *,
        limit: int,
        after: str | None,
        endpoints: Sequence[str],
        newest_first: bool = True,
    ) -> tuple[Sequence[Row], bool]:
        """Returns a page of the batches of these endpoints, and whether more follow."""
        return await read_page(
            connection,
            "batches",
            owner=owner,
            limit=limit,
            after=after,
            newest_first=newest_first,
            condition=f"endpoint IN ({', '.join('?' * len(endpoints))})",
            values=endpoints,
        )

    @writes
    async def delete(self, connection: DatabaseConnection, *, owner: str, batch_id: str) -> Row:
        """Deletes a batch and its results. Raises InvalidRequestError if it has not ended."""
        row = await _owned(connection, owner=owner, batch_id=batch_id, is_locked=True)
        if row["ended_s"] is None:
            raise InvalidRequestError(
                "a batch that has not ended cannot be deleted", field="batch_id", reason="batch_not_ended"
            )
        await connection.change("DELETE FROM batches WHERE id = ?", batch_id)
        return row

    @writes
    async def cancel(self, connection: DatabaseConnection, *, owner: str, batch_id: str) -> Row:
        """Requests cancellation; the holder of the lease ends the batch. Raises InvalidRequestError if it has ended."""
        row = await _owned(connection, owner=owner, batch_id=batch_id, is_locked=True)
        if row["status"] in _CANCELLABLE:
            await _update(connection, batch_id, status=CANCELLING, cancelling_s=self._clock.wall())
        elif row["status"] != CANCELLING:
            raise InvalidRequestError(
                f"a batch that is {row['status']} cannot be cancelled", field="batch_id", reason="batch_ended"
            )
        return await _row(connection, batch_id)

    @writes
    async def claim(self, connection: DatabaseConnection) -> Claim | None:
        """Leases a batch without a lease: of the owners with the fewest leased batches, the one that was released longest ago.

        Of those that were never leased the oldest. Returns None if there is none.
        """
        # One claim at a time, so that each sees the leases that others have taken.
        await connection.lock("batches.claim")
        now_s = self._clock.wall()
        # The outer conditions repeat the inner ones for PostgreSQL: the holder may have renewed its lease or ended the batch in the meantime.
        row = await connection.row(
            "UPDATE batches SET lease_owner = ?, lease_until_s = ?, lease_epoch = lease_epoch + 1"
            f" WHERE {_WAITS} AND id = (SELECT id FROM batches AS waiting WHERE {_WAITS} ORDER BY"
            " (SELECT count(*) FROM batches AS running WHERE running.owner = waiting.owner AND running.ended_s IS NULL"
            " AND running.lease_until_s > ?), lease_until_s, created_s LIMIT 1) RETURNING *",
            self._instance_id, now_s + self._settings.lease_s, now_s, now_s, now_s,
        )  # fmt: skip
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

    @reads
    async def has_waiting_owner(self, connection: DatabaseConnection) -> bool:
        """Returns whether a batch waits whose owner has no leased batch."""
        now_s = self._clock.wall()
        row = await connection.row(
            f"SELECT 1 AS found FROM batches WHERE {_WAITS} AND owner NOT IN"
            " (SELECT owner FROM batches WHERE ended_s IS NULL AND lease_until_s > ?) LIMIT 1",
            now_s,
            now_s,
        )
        return row is not None

    @writes
    async def renew(self, connection: DatabaseConnection, claim: Claim) -> str:
        """Renews the lease and returns the status, which a client may have changed. Raises LeaseLostError."""
        await _fence(connection, claim)
        await _update(connection, claim.batch_id, lease_until_s=self._clock.wall() + self._settings.lease_s)
        return str((await _row(connection, claim.batch_id))["status"])

    @writes
    async def release(
        self, connection: DatabaseConnection, claim: Claim, *, after_failure: bool = False, after_defect: bool = False
    ) -> None:
        """Ends the lease. After a failure, such as a full disk, or a defect the batch waits for one lease time.

        It fails after `DEFECTS_MAX` defects.
        """
        await _fence(connection, claim)
        now_s = self._clock.wall()
        defects = (await _row(connection, claim.batch_id))["defects"] + after_defect
        until_s = now_s + (self._settings.lease_s if after_failure or after_defect else 0.0)  # Claims order by it.
        await _update(connection, claim.batch_id, lease_until_s=until_s, defects=defects)
        if defects >= DEFECTS_MAX:
            problem = [{"code": "internal", "line": None, "message": "internal error", "param": None}]
            await _fail(connection, claim.batch_id, problem, now_s=now_s)

    @writes
    async def begin(self, connection: DatabaseConnection, claim: Claim, *, total: int, model: str | None) -> None:
        """Records that the input is valid. A batch that was cancelled in the meantime stays in `cancelling`."""
        await _fence(connection, claim)
        status = (await _row(connection, claim.batch_id))["status"]
        await _update(
            connection,
            claim.batch_id,
            total=total,
            model=model,
            in_progress_s=self._clock.wall(),
            status=IN_PROGRESS if status == VALIDATING else status,
        )

    @writes
    async def fail(self, connection: DatabaseConnection, claim: Claim, problems: Sequence[Mapping[str, Any]]) -> None:
        """Ends the batch as failed, since its input is not valid."""
        await _fence(connection, claim)
        await _fail(connection, claim.batch_id, problems, now_s=self._clock.wall())

    @reads
    async def done_lines(self, connection: DatabaseConnection, claim: Claim) -> set[int]:
        """Returns the lines that have a result, from this process or an earlier one."""
        rows = await connection.rows("SELECT line FROM results WHERE batch_id = ?", claim.batch_id)
        return {row["line"] for row in rows}

    @writes
    async def record(self, connection: DatabaseConnection, claim: Claim, results: Sequence[LineResult]) -> None:
        """Stores results and updates the counts. A line keeps its first result."""
        await _fence(connection, claim)
        by_line = {each.line: each for each in reversed(results)}  # Reversed: the first result of a line counts.
        if not by_line:
            return
        values = [(claim.batch_id, each.line, int(each.is_error), each.record) for each in by_line.values()]
        added = await connection.rows(
            f"INSERT INTO results (batch_id, line, is_error, record) VALUES {', '.join(['(?, ?, ?, ?)'] * len(values))}"
            " ON CONFLICT (batch_id, line) DO NOTHING RETURNING line",
            *(value for row in values for value in row),
        )
        await _count(connection, claim.batch_id, [by_line[row["line"]] for row in added])

    @writes
    async def expire(self, connection: DatabaseConnection, claim: Claim) -> None:
        """Records that the completion window has ended."""
        await _fence(connection, claim)
        await _update(connection, claim.batch_id, expired_s=self._clock.wall())

    @writes
    async def finalise(self, connection: DatabaseConnection, claim: Claim) -> str:
        """Records that all lines have ended and files are written next. Returns the final status of the batch."""
        await _fence(connection, claim)
        row = await _row(connection, claim.batch_id)
        if row["finalizing_s"] is None:
            await _update(connection, claim.batch_id, finalizing_s=self._clock.wall())
        if row["cancelling_s"] is not None:
            return CANCELLED  # It stays cancelling until the files are there.
        await _update(connection, claim.batch_id, status=FINALIZING)
        return COMPLETED if row["expired_s"] is None else EXPIRED

    @reads
    async def results(
        self, connection: DatabaseConnection, claim: Claim, *, after_line: int, is_error: bool, count: int
    ) -> list[tuple[int, bytes]]:
        """Returns up to `count` results after a line, in the order of the lines. Raises LeaseLostError."""
        rows = await connection.rows(
            "SELECT line, record FROM results WHERE batch_id = ? AND line > ? AND is_error = ? ORDER BY line LIMIT ?",
            claim.batch_id,
            after_line,
            int(is_error),
            count,
        )
        # Checked after the read: the frontend that ends the batch deletes its results, and a file with only the rest would replace the
        # complete one.
        await _fence(connection, claim, is_locked=False)
        return [(row["line"], row["record"]) for row in rows]

    @writes
    async def end(
        self,
        connection: DatabaseConnection,
        claim: Claim,
        status: str,
        *,
        output: OutputFile | None,
        errors: OutputFile | None,
    ) -> None:
        """Ends the batch: adds the rows of its files, which are on the disk, and deletes its results."""
        await _fence(connection, claim)
        now_s = self._clock.wall()
        expires_s = now_s + (self._settings.file_ttl_s if claim.output_ttl_s is None else claim.output_ttl_s)
        for file in (output, errors):
            if file is not None:
                row = (file.file_id, claim.owner, file.name, OUTPUT_PURPOSE, file.size_bytes, now_s, expires_s)
                await insert_file(connection, row)
        await connection.change("DELETE FROM results WHERE batch_id = ?", claim.batch_id)
        await _update(
            connection,
            claim.batch_id,
            status=status,
            ended_s=now_s,
            output_file_id=output and output.file_id,
            error_file_id=errors and errors.file_id,
            lease_until_s=0,
            **{f"{status}_s": now_s},
        )

    @writes
    async def sweep(self, connection: DatabaseConnection) -> int:
        """Deletes batches that ended more than `batch_ttl_s` ago. Returns their number."""
        oldest_s = self._clock.wall() - self._settings.batch_ttl_s
        return await connection.change("DELETE FROM batches WHERE ended_s <= ?", oldest_s)


async def _update(connection: DatabaseConnection, batch_id: str, **columns: object) -> None:
    assignments = ", ".join(f"{name} = ?" for name in columns)
    await connection.change(f"UPDATE batches SET {assignments} WHERE id = ?", *columns.values(), batch_id)


async def _count_of(connection: DatabaseConnection, statement: str, *values: object) -> int:
    row = await connection.row(statement, *values)
    return 0 if row is None else int(row["count"])


async def _row(connection: DatabaseConnection, batch_id: str) -> Row:
    row = await connection.row("SELECT * FROM batches WHERE id = ?", batch_id)
    if row is None:
        raise _not_found(batch_id)
    return row


async def _owned(connection: DatabaseConnection, *, owner: str, batch_id: str, is_locked: bool = False) -> Row:
    lock = connection.row_lock if is_locked else ""
    row = await connection.row(f"SELECT * FROM batches WHERE id = ? AND owner = ?{lock}", batch_id, owner)
    if row is None:
        raise _not_found(batch_id)
    return row


def _not_found(batch_id: str) -> NotFoundError:
    return NotFoundError(f"there is no batch {batch_id[:64]!r}", field="batch_id", reason="batch_not_found")


async def _fence(connection: DatabaseConnection, claim: Claim, *, is_locked: bool = True) -> None:
    """Raises LeaseLostError unless the batch is this claim's; then it stays so until the transaction ends."""
    lock = connection.row_lock if is_locked else ""
    row = await connection.row(f"SELECT lease_epoch, ended_s FROM batches WHERE id = ?{lock}", claim.batch_id)
    if row is None or row["lease_epoch"] != claim.epoch or row["ended_s"] is not None:
        raise LeaseLostError(claim.batch_id)


async def _fail(
    connection: DatabaseConnection, batch_id: str, problems: Sequence[Mapping[str, Any]], *, now_s: float
) -> None:
    await connection.change("DELETE FROM results WHERE batch_id = ?", batch_id)
    errors = orjson.dumps(list(problems)).decode()
    await _update(connection, batch_id, status=FAILED, failed_s=now_s, ended_s=now_s, errors=errors, lease_until_s=0)


async def _count(connection: DatabaseConnection, batch_id: str, results: Sequence[LineResult]) -> None:
    usages = [each.usage for each in results]
    failed = sum(each.is_error for each in results)
    await connection.change(
        "UPDATE batches SET completed = completed + ?, failed = failed + ?, unrun = unrun + ?,"
        " input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?,"
        " reasoning_tokens = reasoning_tokens + ? WHERE id = ?",
        len(results) - failed,
        failed,
        sum(each.is_unrun for each in results),
        sum(each.prompt_tokens for each in usages),
        sum(each.cached_tokens for each in usages),
        sum(each.output_tokens for each in usages),
        sum(each.reasoning_tokens for each in usages),
        batch_id,
    )
