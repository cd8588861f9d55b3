"""Who made a batch, kept with it: its requests are charged to its maker's quota long after the request that made it.

What the key allowed at that time holds for the whole batch; a key that is taken back later stops no batch.
"""

from dataclasses import asdict
from typing import Any

import orjson

from services.frontend.access.caller import ANYBODY, Caller, Quota


def written_caller(caller: Caller) -> str:
    """The caller as text."""
    if caller is ANYBODY:
        return ""
    record: dict[str, Any] = {
        "tenant": caller.tenant,
        "key_id": caller.key_id,
        "models": None if caller.models is None else sorted(caller.models),
        "quota": asdict(caller.quota),
    }
    return orjson.dumps(record).decode()


def read_caller(text: str) -> Caller:
    """The caller again; limits that this version does not know are left out."""
    if not text:
        return ANYBODY
    record = orjson.loads(text)
    models = record["models"]
    known = {name: limit for name, limit in record["quota"].items() if name in Quota.__slots__}
    return Caller(
        tenant=record["tenant"],
        key_id=record["key_id"],
        models=None if models is None else frozenset(models),
        quota=Quota(**known),
    )
