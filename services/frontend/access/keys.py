"""API keys: loaded from a JSON document, looked up by hash.

    {"keys": [{"tenant": "acme", "key_sha256": "<64 hex digits>", "models": ["demo"], "requests_per_minute": 600,
               "tokens_per_minute": 100000, "concurrent_requests": 32, "priority_max": 0, "expires_at": "2030-01-01T00:00:00Z"}]}

Only `tenant` and `key_sha256` are required. Keys are long and random, so a plain SHA-256 cannot be reversed; a slow hash would
only delay each request. Several keys of one tenant share one quota, that of the last of them in the document: during a rotation
both keys are listed.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

import orjson

from kvmesh.errors import InvalidRequestError, UnauthenticatedError
from services.frontend.access.caller import Caller, Quota

KEYS_MAX = 100_000
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_TENANT = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_QUOTAS = tuple(each.name for each in fields(Quota))
_FLAGS = ("compressed_bodies", "operator")
_KNOWN = {"tenant", "key_sha256", "models", "expires_at", *_FLAGS, *_QUOTAS}


def hash_of(key: str) -> str:
    """Returns the hex digest that the document lists for a key. In `key`, header bytes that are not UTF-8 are surrogates."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """One key. `expires_at_s`: Unix time."""

    caller: Caller
    expires_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBook:
    """All keys by hash."""

    entries: Mapping[str, KeyEntry] = field(default_factory=dict)

    def find(self, key: str, *, wall_s: float) -> Caller:
        """Returns the caller with this key. Raises UnauthenticatedError."""
        # How long the lookup of a hash takes shows nothing of the keys, so no comparison in constant time is needed.
        entry = self.entries.get(hash_of(key))
        if entry is None:
            raise UnauthenticatedError("the API key is unknown", reason="invalid_api_key")
        if entry.expires_at_s is not None and wall_s >= entry.expires_at_s:
            raise UnauthenticatedError("the API key has expired", reason="expired_api_key")
        return entry.caller

    def of_tenant(self, tenant: str, *, wall_s: float) -> Caller:
        """Returns a caller with the permissions that all of the tenant's keys share, since the original key is not known."""
        live = [
            entry.caller
            for entry in self.entries.values()
            if entry.caller.tenant == tenant and (entry.expires_at_s is None or wall_s < entry.expires_at_s)
        ]
        if not live:
            raise UnauthenticatedError("the tenant no longer has a valid API key", reason="expired_api_key")
        limited = [caller.models for caller in live if caller.models is not None]
        models = frozenset.intersection(*limited) if limited else None
        return replace(live[-1], models=models)


def read_keys(document: bytes) -> KeyBook:
    """Parses a document. Raises one InvalidRequestError with all problems."""
    try:
        value = orjson.loads(document)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the key document is not JSON: {error}", field="keys") from error
    rows = value.get("keys") if isinstance(value, dict) else None
    if not isinstance(rows, list) or len(rows) > KEYS_MAX:
        raise InvalidRequestError(
            f"the document must be an object with a list `keys` of at most {KEYS_MAX}", field="keys"
        )
    problems: list[str] = []
    entries: dict[str, KeyEntry] = {}
    for number, row in enumerate(rows):
        wrong = _problems(row)
        if not wrong and row["key_sha256"] in entries:
            wrong = ["key_sha256 is listed twice"]
        if wrong:
            problems += [f"keys[{number}]: {each}" for each in wrong]
        else:
            entries[row["key_sha256"]] = _entry(row)
    if problems:
        raise InvalidRequestError("; ".join(problems[:20]), field="keys")
    return KeyBook(entries=entries)


def _problems(row: Any) -> list[str]:
    if not isinstance(row, dict):
        return ["must be an object"]
    wrong = [f"{name!r} is not known" for name in row if name not in _KNOWN]
    if not isinstance(row.get("tenant"), str) or not _TENANT.match(row["tenant"]):
        wrong.append("tenant must be 1 to 128 of A-Z a-z 0-9 . _ : -")
    if not isinstance(row.get("key_sha256"), str) or not _HASH.match(row["key_sha256"]):
        wrong.append("key_sha256 must be 64 lower-case hex digits")
    models = row.get("models")
    if models is not None and not (isinstance(models, list) and all(isinstance(name, str) for name in models)):
        wrong.append("models must be a list of names")
    for name in _QUOTAS:
        least = -100 if name == "priority_max" else 1
        limit = row.get(name)
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < least):
            wrong.append(f"{name} must be a whole number of at least {least}")
    wrong += [f"{name} must be true or false" for name in _FLAGS if not isinstance(row.get(name), bool | None)]
    if row.get("expires_at") is not None and _time(row["expires_at"]) is None:
        wrong.append("expires_at must be a time with its zone, such as 2030-01-01T00:00:00Z")
    return wrong


def _entry(row: Mapping[str, Any]) -> KeyEntry:
    models = row.get("models")
    return KeyEntry(
        caller=Caller(
            tenant=row["tenant"],
            key_id=row["key_sha256"][:8],
            models=frozenset(models) if models is not None else None,
            quota=Quota(**{"priority_max": 0, **{name: row[name] for name in _QUOTAS if row.get(name) is not None}}),
            sends_compressed=bool(row.get("compressed_bodies")),
            is_operator=bool(row.get("operator")),
        ),
        expires_at_s=_time(row["expires_at"]) if row.get("expires_at") is not None else None,
    )


def _time(text: Any) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return moment.timestamp() if moment.tzinfo is not None else None
