"""Stored responses: conversations continue from them, and clients retrieve them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, NotFoundError
from services.frontend.settings import ResponsesSettings
from services.frontend.stores.database import Database, DatabaseConnection, Row, reads, writes

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
CHAIN_MAX, CHAIN_BYTES_MAX = 256, 8 << 20
"""Most earlier responses that one request continues, and their bytes: the default limit of a request body."""
_CHAIN = """
WITH RECURSIVE chain (id, previous_id, depth, total_bytes) AS (
  SELECT id, previous_id, 1, size_bytes FROM responses WHERE id = ? AND owner = ?
  UNION ALL
  SELECT earlier.id, earlier.previous_id, chain.depth + 1, chain.total_bytes + earlier.size_bytes
  FROM responses AS earlier JOIN chain ON earlier.id = chain.previous_id
  WHERE earlier.owner = ? AND chain.depth < ? AND chain.total_bytes <= ?
)
SELECT id, previous_id, depth, total_bytes FROM chain ORDER BY depth DESC
"""
_LOCK = "responses"
"""Locked by all that add and delete, which count bytes in one row. So none waits for another that waits for it."""
_EVICTED_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """The body of a response, and the input items of its request."""

    body: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]


class ResponseStore:
    """Stores responses. `owner` separates tenants: a tenant finds only its own responses.

    0. An owner who stores less than an equal share of `stored_bytes_max` loses no response because of others.
    1. After a sweep at most `stored_bytes_max` bytes remain, and no response that was unused for longer than `ttl_s`.
    2. Using a response renews all responses that it continues.
    """

    def __init__(self, database: Database, settings: ResponsesSettings, clock: Clock) -> None:
        self.database = database
        self._settings = settings
        self._clock = clock

    @writes
    async def put(
        self, connection: DatabaseConnection, owner: str, body: Mapping[str, Any], *, items: Sequence[Mapping[str, Any]]
    ) -> None:
        """Stores a response. All processes find it when this returns."""
        now_s = self._clock.wall()
        body_bytes, items_bytes = orjson.dumps(body), orjson.dumps(items)
        size_bytes = len(body_bytes) + len(items_bytes)
        await connection.lock(_LOCK)
        await connection.change(
            # A transaction that runs again finds its own row.
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
            body["id"], owner, body["previous_response_id"], now_s, now_s, body_bytes, items_bytes, size_bytes,
        )  # fmt: skip
        await self._make_room(connection)

    @reads
    async def get(self, connection: DatabaseConnection, *, owner: str, response_id: str) -> StoredResponse:
        """Returns a response. Raises NotFoundError if it was never stored, has expired, was deleted, or has another owner."""
        row = await connection.row(
            "SELECT body, items FROM responses WHERE id = ? AND owner = ? AND used_s > ?",
            response_id,
            owner,
            self._oldest_s(),
        )
        if row is None:
            raise _not_found(response_id, field="response_id")
        return StoredResponse(body=orjson.loads(row["body"]), items=orjson.loads(row["items"]))

    @writes
    async def delete(self, connection: DatabaseConnection, *, owner: str, response_id: str) -> None:
        """Deletes a response. Responses that continue it can no longer be continued. Raises NotFoundError."""
        await connection.lock(_LOCK)
        if not await connection.change("DELETE FROM responses WHERE id = ? AND owner = ?", response_id, owner):
            raise _not_found(response_id, field="response_id")

    @writes
    async def conversation(
        self, connection: DatabaseConnection, *, owner: str, response_id: str
    ) -> list[Mapping[str, Any]]:
        """Returns all items up to the response's output, oldest first, and marks the responses as used.

        Raises InvalidRequestError if the chain has a gap or is too long, NotFoundError if the response does not exist.
        """
        # One response above the limit shows that the chain is too long.
        chain = await connection.rows(_CHAIN, response_id, owner, owner, CHAIN_MAX + 1, CHAIN_BYTES_MAX)
        _check_chain(chain, response_id)
        items: list[Mapping[str, Any]] = []
        for each in chain:
            row = await connection.row(
                "UPDATE responses SET used_s = ? WHERE id = ? AND used_s > ? RETURNING body, items",
                self._clock.wall(),
                each["id"],
                self._oldest_s(),
            )
            if row is None:
                raise _not_found(response_id, field="previous_response_id")
            items += [*orjson.loads(row["items"]), *orjson.loads(row["body"])["output"]]
        return items

    @writes
    async def sweep(self, connection: DatabaseConnection) -> int:
        """Deletes expired responses, and while the store is too large, the least recently used ones of the owner who stores most.

        Returns their number.
        """
        await connection.lock(_LOCK)
        gone = await connection.change("DELETE FROM responses WHERE used_s <= ?", self._oldest_s())
        return gone + await self._make_room(connection)

    def _oldest_s(self) -> float:
        return self._clock.wall() - self._settings.ttl_s

    async def _make_room(self, connection: DatabaseConnection) -> int:
        gone = 0
        while True:
            total = await connection.row("SELECT size_bytes FROM totals")
            size_bytes = 0 if total is None else total["size_bytes"]
            if size_bytes <= self._settings.stored_bytes_max:
                return gone
            most = await connection.row(
                "SELECT owner FROM responses GROUP BY owner ORDER BY sum(size_bytes) DESC LIMIT 1"
            )
            deleted = await connection.change(
                "DELETE FROM responses WHERE id IN (SELECT id FROM responses WHERE owner = ? ORDER BY used_s LIMIT ?)",
                "" if most is None else most["owner"],
                # One at a time keeps as many responses as possible. Far above the limit it would take too long.
                _EVICTED_AT_ONCE if size_bytes > 2 * self._settings.stored_bytes_max else 1,
            )
            if not deleted:
                return gone
            gone += deleted


def _check_chain(chain: Sequence[Row], response_id: str) -> None:
    field = "previous_response_id"
    if not chain:
        raise _not_found(response_id, field=field)
    oldest = chain[0]
    if oldest["depth"] > CHAIN_MAX or oldest["total_bytes"] > CHAIN_BYTES_MAX:
        raise InvalidRequestError(
            f"the conversation is longer than {CHAIN_MAX} responses or {CHAIN_BYTES_MAX} bytes",
            field=field,
            reason="conversation_too_long",
        )
    if oldest["previous_id"] is not None:
        raise InvalidRequestError(
            "an earlier response of the conversation is no longer stored",
            field=field,
            reason="previous_response_not_found",
        )


def _not_found(response_id: str, field: str) -> NotFoundError:
    reason = "previous_response_not_found" if field == "previous_response_id" else "response_not_found"
    return NotFoundError(f"there is no stored response {response_id[:64]!r}", field=field, reason=reason)
