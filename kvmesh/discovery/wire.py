"""Converts between Consul's JSON and durations and the mesh's records, and Consul's refusals to errors. No I/O."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.discovery.base import Entry, Health, Instance, Registration
from kvmesh.errors import (
    InvalidRequestError,
    MeshError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from kvmesh.network.names import host_port

CHECK_TIMEOUT_S = 5.0
"""How long the agent waits for an instance's gRPC health. A worker that loads a model on all cores may take seconds to answer."""
SERVICE_MAINTENANCE = "_service_maintenance:"
NODE_MAINTENANCE = "_node_maintenance"
_WORST_FIRST = (Health.CRITICAL, Health.WARNING, Health.PASSING)
# Consul's messages about unknown objects. The status is 500 in 1.8 and 404 later.
_UNKNOWN = ("does not have associated TTL", "Unknown check", "Unknown service", "invalid session", "UUID must be 36")
_REFUSAL_LENGTH_MAX = 200
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_DURATION_LENGTH_MAX = 64


def duration_text(duration_s: float) -> str:
    """Returns the seconds as one of Go's duration texts, to the millisecond."""
    return f"{round(duration_s * 1000)}ms"


def duration_seconds(text: str) -> float:
    """Returns the seconds of a Go duration text such as `90s`, `1m30s` or `250ms`. ValueError for anything else, negative ones included."""
    if text == "0":
        return 0.0
    if not text or len(text) > _DURATION_LENGTH_MAX:
        raise ValueError(f"not a duration: {text[:_DURATION_LENGTH_MAX]!r}")
    total_s, position = 0.0, 0
    while position < len(text):
        part = _DURATION_PART.match(text, position)
        if part is None:
            raise ValueError(f"not a duration: {text!r}")
        total_s += float(part[1]) * _UNITS_S[part[2]]
        position = part.end()
    return total_s


def ttl_check_id(instance_id: str) -> str:
    """Returns the heartbeat's check. The mesh chooses check ids, so that a repeated registration replaces its checks."""
    return f"{instance_id}:ttl"


def grpc_check_id(instance_id: str) -> str:
    return f"{instance_id}:grpc"


def registration_body(registration: Registration, *, check_timeout_s: float = CHECK_TIMEOUT_S) -> dict[str, Any]:
    """Returns the body of /v1/agent/service/register."""
    shared = {"DeregisterCriticalServiceAfter": duration_text(registration.deregister_after_s)}
    heartbeat = {
        "CheckID": ttl_check_id(registration.instance_id),
        "Name": "heartbeat",
        "TTL": duration_text(registration.ttl_s),
    }
    health = {
        "CheckID": grpc_check_id(registration.instance_id),
        "Name": "grpc.health.v1",
        "GRPC": host_port(registration.host, registration.port),
        "GRPCUseTLS": registration.uses_tls,
        "Interval": duration_text(registration.check_interval_s),
        "Timeout": duration_text(check_timeout_s),
    }
    return {
        "ID": registration.instance_id,
        "Name": registration.service,
        "Address": registration.host,
        "Port": registration.port,
        "Tags": list(registration.tags),
        "Meta": dict(registration.meta),
        "Checks": [heartbeat | shared, *([health | shared] if registration.is_checked else [])],
    }


def instances(service: str, body: bytes) -> tuple[Instance, ...]:
    """Returns the instances in an answer of /v1/health/service, by id. UnavailableError when the answer is malformed."""
    try:
        found = [_instance(service, entry) for entry in json.loads(body)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _garbled("health") from error
    return tuple(sorted(found, key=lambda instance: (instance.instance_id, instance.host, instance.port)))


def _instance(service: str, entry: Mapping[str, Any]) -> Instance:
    record = entry["Service"]
    checks: Sequence[Mapping[str, Any]] = entry["Checks"] or ()
    instance_id = str(record["ID"])
    drain_marks = [check for check in checks if _is_drain_mark(check)]
    statuses = {Health(check["Status"]) for check in checks if not _is_drain_mark(check)}
    return Instance(
        service=service,
        instance_id=instance_id,
        host=str(record["Address"] or entry["Node"]["Address"]),
        port=int(record["Port"]),
        meta={str(key): str(value) for key, value in (record["Meta"] or {}).items()},
        tags=tuple(str(tag) for tag in record["Tags"] or ()),
        health=next((health for health in _WORST_FIRST if health in statuses), Health.PASSING),
        is_draining=bool(drain_marks),
        notes=_notes(instance_id, checks, drain_marks),
    )


def _is_drain_mark(check: Mapping[str, Any]) -> bool:
    check_id = str(check["CheckID"])
    return check_id.startswith(SERVICE_MAINTENANCE) or check_id == NODE_MAINTENANCE


def _notes(instance_id: str, checks: Sequence[Mapping[str, Any]], drain_marks: Sequence[Mapping[str, Any]]) -> str:
    for mark in drain_marks:
        return str(mark.get("Notes") or "")
    heartbeat = ttl_check_id(instance_id)
    return next((str(check.get("Output") or "") for check in checks if check["CheckID"] == heartbeat), "")


def entries(body: bytes) -> tuple[Entry, ...]:
    """Returns the entries in an answer of /v1/kv, by key. UnavailableError when the answer is malformed."""
    try:
        return tuple(sorted((_entry(record) for record in json.loads(body)), key=lambda entry: entry.key))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _garbled("key") from error


def _entry(record: Mapping[str, Any]) -> Entry:
    return Entry(
        key=str(record["Key"]),
        value=base64.b64decode(record["Value"] or "", validate=True),
        modify_index=int(record["ModifyIndex"]),
        session=str(record.get("Session") or ""),
    )


def truth(body: bytes) -> bool:
    """Returns the answer of a conditional write."""
    text = body.strip()
    if text not in (b"true", b"false"):
        raise _garbled("write")
    return text == b"true"


def session_id(body: bytes) -> str:
    """Returns the id in an answer of /v1/session/create."""
    try:
        return str(json.loads(body)["ID"])
    except (ValueError, KeyError, TypeError) as error:
        raise _garbled("session") from error


def failure(status: int, text: str) -> MeshError:
    """Returns the error for an answer that is not 200."""
    message = f"the registry answered {status}: {' '.join(text.split())[:_REFUSAL_LENGTH_MAX]}"
    if status == 404 or (status == 500 and any(words in text for words in _UNKNOWN)):
        return NotFoundError(message)
    if status == 401 or (status == 403 and "ACL not found" in text):
        return UnauthenticatedError(message)
    if status == 403:
        return PermissionDeniedError(message)
    if status == 429:
        return OverloadedError(message)
    if status >= 500:
        return UnavailableError(message, reason="registry_failing")
    return InvalidRequestError(message)


def _garbled(what: str) -> UnavailableError:
    return UnavailableError(f"the registry's {what} answer is not Consul's", reason="registry_garbled")
