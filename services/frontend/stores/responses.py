"""Stored responses: conversations continue from them, and clients retrieve them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, NotFoundError
from services.frontend.settings import ResponsesSettings
from services.frontend.stores.database import Connection, Database, reads, writes

_FIRST = """
CREATE TABLE responses (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  previous_id TEXT,
  created_s REAL NOT NULL,
  used_s REAL NOT NULL,
  body BLOB NOT NULL,
  items BLOB NOT NULL,
  size_bytes INTEGER NOT NULL
) WITHOUT ROWID;;
CREATE INDEX responses_by_use ON responses (used_s);;
CREATE TABLE totals (size_bytes INTEGER NOT NULL);;
INSERT INTO totals VALUES (0);;
CREATE TRIGGER responses_added AFTER INSERT ON responses BEGIN
  UPDATE totals SET size_bytes = size_bytes + new.size_bytes;
END;;
CREATE TRIGGER responses_removed AFTER DELETE ON responses BEGIN
  UPDATE totals SET size_bytes = size_bytes - old.size_bytes;
END
"""
MIGRATIONS = (_FIRST,)
_CHAIN = """
WITH RECURSIVE chain (id, previous_id, depth, total_bytes) AS (
  SELECT id, previous_id, 1, size_bytes FROM responses WHERE id = :id AND owner = :owner
  UNION ALL
  SELECT each.id, each.previous_id, chain.depth + 1, chain.total_bytes + each.size_bytes
  FROM responses AS each JOIN chain ON each.id = chain.previous_id
  WHERE each.owner = :owner AND chain.depth < :depth_max AND chain.total_bytes <= :bytes_max
)
SELECT id, previous_id, depth, total_bytes FROM chain ORDER BY depth DESC
"""
_EVICTED_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """The body of a response, and the input items of its request."""

    body: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]


class ResponseStore:
    """Stores responses in SQLite. `owner` separates tenants: a tenant finds only its own responses.

    0. An owner who stores less than an equal share of `stored_bytes_max` loses nothing to others.
    1. After a sweep at most `stored_bytes_max` bytes remain, and no response that was unused for longer than `ttl_s`.
    2. Using a response renews all responses that it continues.
    """

    def __init__(self, path: Path, settings: ResponsesSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self.database = Database(path, MIGRATIONS, busy_timeout_s=settings.busy_timeout_s, calls_max=settings.calls_max)

    async def open(self) -> None:
        """Opens the file. Raises UnavailableError with the reason if it cannot be used."""
        await self.database.open()

    async def aclose(self) -> None:
        """Closes the file. Idempotent."""
        await self.database.aclose()

    @writes
    def put(
        self, connection: Connection, owner: str, body: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
    ) -> None:
        """Stores a response. All processes find it when this returns."""
        now_s = self._clock.wall()
        body_bytes, items_bytes = orjson.dumps(body), orjson.dumps(items)
        size_bytes = len(body_bytes) + len(items_bytes)
        connection.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (body["id"], owner, body["previous_response_id"], now_s, now_s, body_bytes, items_bytes, size_bytes),
        )
        self._make_room(connection)

    @reads
    def get(self, connection: Connection, *, owner: str, response_id: str) -> StoredResponse:
        """Returns a response. Raises NotFoundError if it was never stored, has expired, was deleted, or has another owner."""
        row = connection.execute(
            "SELECT body, items FROM responses WHERE id = ? AND owner = ? AND used_s > ?",
            (response_id, owner, self._oldest_s()),
        ).fetchone()
        if row is None:
            raise _not_found(response_id, "response_id")
        return StoredResponse(body=orjson.loads(row["body"]), items=orjson.loads(row["items"]))

    @writes
    def delete(self, connection: Connection, *, owner: str, response_id: str) -> None:
        """Deletes a response. Responses that continue it can no longer be continued. Raises NotFoundError."""
        if not connection.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)).rowcount:
            raise _not_found(response_id, "response_id")

    @writes
    def conversation(self, connection: Connection, *, owner: str, response_id: str) -> list[Mapping[str, Any]]:
        """Returns all items up to the response's output, oldest first, and marks the responses as used.

        Raises InvalidRequestError if the chain has a gap or is too long, NotFoundError if the response does not exist.
        """
        limits = {"depth_max": self._settings.chain_max + 1, "bytes_max": self._settings.chain_bytes_max}
        chain = connection.execute(_CHAIN, {"id": response_id, "owner": owner, **limits}).fetchall()
        _check_chain(chain, response_id, self._settings)
        items: list[Mapping[str, Any]] = []
        for each_id, *_ in chain:
            row = connection.execute("SELECT used_s, body, items FROM responses WHERE id = ?", (each_id,)).fetchone()
            if row["used_s"] <= self._oldest_s():
                raise _not_found(response_id, "previous_response_id")
            connection.execute("UPDATE responses SET used_s = ? WHERE id = ?", (self._clock.wall(), each_id))
            items += [*orjson.loads(row["items"]), *orjson.loads(row["body"])["output"]]
        return items

    @writes
    def sweep(self, connection: Connection) -> int:
        """Deletes expired responses, and while the store is too large the least recently used of the owner who has most.

        Returns their number.
        """
        gone = connection.execute("DELETE FROM responses WHERE used_s <= ?", (self._oldest_s(),)).rowcount
        return gone + self._make_room(connection)

    def _oldest_s(self) -> float:
        return self._clock.wall() - self._settings.ttl_s

    def _make_room(self, connection: Connection) -> int:
        gone = 0
        while True:
            (size_bytes,) = connection.execute("SELECT size_bytes FROM totals").fetchone()
            if size_bytes <= self._settings.stored_bytes_max:
                return gone
            (owner,) = connection.execute(
                "SELECT owner FROM responses GROUP BY owner ORDER BY sum(size_bytes) DESC LIMIT 1"
            ).fetchone() or ("",)
            deleted = connection.execute(
                "DELETE FROM responses WHERE id IN (SELECT id FROM responses WHERE owner = ? ORDER BY used_s LIMIT ?)",
                (owner, _EVICTED_AT_ONCE if size_bytes > 2 * self._settings.stored_bytes_max else 1),
            ).rowcount
            if not deleted:
                return gone
            gone += deleted


def _check_chain(
    chain: Sequence[tuple[str, str | None, int, int]], response_id: str, settings: ResponsesSettings
) -> None:
    field = "previous_response_id"
    if not chain:
        raise _not_found(response_id, field)
    _, previous_id, depth, total_bytes = chain[0]
    if depth > settings.chain_max or total_bytes > settings.chain_bytes_max:
        raise InvalidRequestError(
            f"the conversation is longer than {settings.chain_max} responses or {settings.chain_bytes_max} bytes",
            field=field,
            reason="conversation_too_long",
        )
    if previous_id is not None:
        raise InvalidRequestError(
            "an earlier response of the conversation is not stored any more",
            field=field,
            reason="previous_response_not_found",
        )


def _not_found(response_id: str, field: str) -> NotFoundError:
    reason = "previous_response_not_found" if field == "previous_response_id" else "response_not_found"
    return NotFoundError(f"there is no stored response {response_id[:64]!r}", field=field, reason=reason)
