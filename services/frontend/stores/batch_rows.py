"""The SQLite schema of files and batches, and the conversion of rows to OpenAI's objects."""

from dataclasses import dataclass
from typing import Any

import orjson

from services.frontend.stores.database import Row

_FIRST = """
CREATE TABLE files (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  name TEXT NOT NULL,
  purpose TEXT NOT NULL,
  size_bytes INTEGER NOT NULL,
  created_s REAL NOT NULL,
  expires_s REAL NOT NULL
) WITHOUT ROWID;;
CREATE INDEX files_by_age ON files (owner, created_s, id);;
CREATE TABLE batches (
  id TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  endpoint TEXT NOT NULL,
  input_file_id TEXT NOT NULL,
  completion_window TEXT NOT NULL,
  metadata TEXT,
  output_ttl_s REAL,
  status TEXT NOT NULL,
  created_s REAL NOT NULL,
  expires_s REAL NOT NULL,
  in_progress_s REAL,
  finalizing_s REAL,
  completed_s REAL,
  failed_s REAL,
  expired_s REAL,
  cancelling_s REAL,
  cancelled_s REAL,
  ended_s REAL,
  total INTEGER NOT NULL DEFAULT 0,
  completed INTEGER NOT NULL DEFAULT 0,
  failed INTEGER NOT NULL DEFAULT 0,
  unrun INTEGER NOT NULL DEFAULT 0,
  input_tokens INTEGER NOT NULL DEFAULT 0,
  cached_tokens INTEGER NOT NULL DEFAULT 0,
  output_tokens INTEGER NOT NULL DEFAULT 0,
  reasoning_tokens INTEGER NOT NULL DEFAULT 0,
  model TEXT,
  errors TEXT,
  output_file_id TEXT,
  error_file_id TEXT,
  defects INTEGER NOT NULL DEFAULT 0,
  lease_owner TEXT NOT NULL DEFAULT '',
  lease_until_s REAL NOT NULL DEFAULT 0,
  lease_epoch INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;;
CREATE INDEX batches_by_age ON batches (owner, created_s, id);;
CREATE INDEX batches_to_run ON batches (created_s) WHERE ended_s IS NULL;;
CREATE TABLE results (
  batch_id TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
  line INTEGER NOT NULL,
  is_error INTEGER NOT NULL,
  record BLOB NOT NULL,
  PRIMARY KEY (batch_id, line)
) WITHOUT ROWID
"""
MIGRATIONS = (_FIRST,)

VALIDATING, IN_PROGRESS, FINALIZING = "validating", "in_progress", "finalizing"
COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED = "completed", "failed", "expired", "cancelling", "cancelled"
INPUT_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A batch that this process holds a lease on. `epoch` fences off earlier holders."""

    batch_id: str
    owner: str
    endpoint: str
    input_file_id: str
    status: str
    is_valid: bool
    epoch: int
    expires_s: float
    output_ttl_s: float | None


def file_body(row: Row) -> dict[str, Any]:
    """Converts a row to OpenAI's file object."""
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["size_bytes"],
        "created_at": int(row["created_s"]),
        "expires_at": int(row["expires_s"]),
        "filename": row["name"],
        "purpose": row["purpose"],
        "status": "processed",
        "status_details": None,
    }


_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def batch_body(row: Row) -> dict[str, Any]:
    """Converts a row to OpenAI's batch object."""
    errors = orjson.loads(row["errors"]) if row["errors"] else None
    times = {f"{name}_at": None if row[f"{name}_s"] is None else int(row[f"{name}_s"]) for name in _TIMES}
    return {
        "id": row["id"],
        "object": "batch",
        "endpoint": row["endpoint"],
        "model": row["model"],
        "errors": None if errors is None else {"object": "list", "data": errors},
        "input_file_id": row["input_file_id"],
        "completion_window": row["completion_window"],
        "status": row["status"],
        "output_file_id": row["output_file_id"],
        "error_file_id": row["error_file_id"],
        "created_at": int(row["created_s"]),
        "expires_at": int(row["expires_s"]),
        **times,
        "request_counts": {"total": row["total"], "completed": row["completed"], "failed": row["failed"]},
        "metadata": orjson.loads(row["metadata"]) if row["metadata"] else None,
        "usage": _usage(row),
    }


def _usage(row: Row) -> dict[str, Any]:
    return {
        "input_tokens": row["input_tokens"],
        "input_tokens_details": {"cached_tokens": row["cached_tokens"]},
        "output_tokens": row["output_tokens"],
        "output_tokens_details": {"reasoning_tokens": row["reasoning_tokens"]},
        "total_tokens": row["input_tokens"] + row["output_tokens"],
    }
