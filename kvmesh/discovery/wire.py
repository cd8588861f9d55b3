"""Consul's JSON to and from the mesh's records, and its refusals to errors. No I/O."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.discovery.base import Entry, Health, Instance, Registration
from kvmesh.discovery.duration import to_text
from kvmesh.errors import (
    InvalidRequestError,
    MeshError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)

SERVICE_MAINTENANCE = "_service_maintenance:"
NODE_MAINTENANCE = "_node_maintenance"
_WORST_FIRST = (Health.CRITICAL, Health.WARNING, Health.PASSING)
# What Consul says, with status 500 (1.8) or 404 (later), of things that it does not know.
_UNKNOWN = ("does not have associated TTL", "Unknown check", "Unknown service", "invalid session", "UUID must be 36")
_REFUSAL_LENGTH_MAX = 200


def ttl_check_id(instance_id: str) -> str:
    """The heartbeat's check; ids are ours, so that replacing a registration replaces its checks."""
    return f"{instance_id}:ttl"


def grpc_check_id(instance_id: str) -> str:
    return f"{instance_id}:grpc"


def registration_body(registration: Registration, *, check_timeout_s: float) -> dict[str, Any]:
    """The body of /v1/agent/service/register."""
    shared = {"DeregisterCriticalServiceAfter": to_text(registration.deregister_after_s)}
    heartbeat = {
        "CheckID": ttl_check_id(registration.instance_id),
        "Name": "heartbeat",
        "TTL": to_text(registration.ttl_s),
    }
    health = {
        "CheckID": grpc_check_id(registration.instance_id),
        "Name": "grpc.health.v1",
        "GRPC": grpc_target(registration.host, registration.port),
        "GRPCUseTLS": registration.uses_tls,
        "Interval": to_text(registration.check_interval_s),
        "Timeout": to_text(check_timeout_s),
    }
    return {
        "ID": registration.instance_id,
        "Name": registration.service,
        "Address": registration.host,
        "Port": registration.port,
        "Tags": list(registration.tags),
        "Meta": dict(registration.meta),
        "Checks": [heartbeat | shared, health | shared],
    }


def grpc_target(host: str, port: int) -> str:
    """host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def instances(service: str, body: bytes) -> tuple[Instance, ...]:
    """The instances in an answer of /v1/health/service, by id. UnavailableError when it is not such an answer."""
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
    """The entries in an answer of /v1/kv, by key. UnavailableError when it is not such an answer."""
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
    """The answer of a conditional write."""
    answer = body.strip()
    if answer not in (b"true", b"false"):
        raise _garbled("write")
    return answer == b"true"


def session_id(body: bytes) -> str:
    """The id in an answer of /v1/session/create."""
    try:
        return str(json.loads(body)["ID"])
    except (ValueError, KeyError, TypeError) as error:
        raise _garbled("session") from error


def failure(status: int, text: str) -> MeshError:
    """The error for an answer that is not 200."""
    said = " ".join(text.split())[:_REFUSAL_LENGTH_MAX]
    message = f"the registry answered {status}: {said}"
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
