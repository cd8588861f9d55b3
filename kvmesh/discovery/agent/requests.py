"""Parses request bodies and query parameters of the agent. InvalidRequestError names the wrong field."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvmesh.discovery import limits
from kvmesh.discovery.agent.keys import SessionDefinition
from kvmesh.discovery.agent.records import CheckDefinition, ServiceDefinition
from kvmesh.discovery.base import Health
from kvmesh.discovery.limits import invalid_field
from kvmesh.discovery.wire import duration_seconds
from kvmesh.errors import InvalidRequestError

T = TypeVar("T")

_SERVICE_FIELDS = {"ID", "Name", "Address", "Port", "Tags", "Meta", "Check", "Checks", "EnableTagOverride"}
_CHECK_FIELDS = {
    "CheckID", "Name", "Notes", "Status", "TTL", "GRPC", "GRPCUseTLS", "Interval", "Timeout",
    "DeregisterCriticalServiceAfter",
}  # fmt: skip
_SESSION_FIELDS = {"Name", "TTL", "LockDelay", "Behavior", "Node", "NodeChecks", "Checks", "ServiceChecks"}
# Consul's default lock delay: the time for which no session can acquire the lock of an expired session.
_LOCK_DELAY_DEFAULT_S = 15.0
_ADDRESS_LENGTH_MAX = 255


class Fields:
    """A JSON object whose fields are checked as they are read. Unknown fields are refused."""

    def __init__(self, record: object, known: set[str], where: str = "") -> None:
        if not isinstance(record, dict):
            raise invalid_field(where or "body", claim="must be an object")
        unknown = sorted(set(record) - known)
        if unknown:
            raise invalid_field(f"{where}{unknown[0]}", claim="is not a field that this agent takes")
        self._record: Mapping[str, Any] = record
        self._where = where

    def get(self, name: str, kind: type[T], default: T) -> T:
        """Returns a field's value, `default` when it is absent or null."""
        value = self._record.get(name)
        if value is None:
            return default
        # A bool is an int to Python, not to JSON.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise invalid_field(f"{self._where}{name}", claim=f"must be of type {kind.__name__}")
        return value

    def duration_s(self, name: str, default_s: float | None) -> float | None:
        return self.parsed(name, duration_seconds, default_s)

    def parsed(self, name: str, parse: Callable[[str], T], default: T) -> T:
        """Returns a string field, converted by `parse`, which raises ValueError."""
        text = self.get(name, str, "")
        try:
            return parse(text) if text else default
        except ValueError as error:
            raise invalid_field(f"{self._where}{name}", claim=str(error)) from None


def service_definition(body: bytes) -> ServiceDefinition:
    """Returns the body of /v1/agent/service/register."""
    fields = Fields(_json(body), _SERVICE_FIELDS)
    name = fields.get("Name", str, "")
    limits.check_service(name)
    service_id = fields.get("ID", str, "") or name
    limits.check_instance_id(service_id)
    address, port = fields.get("Address", str, ""), fields.get("Port", int, 0)
    if len(address) > _ADDRESS_LENGTH_MAX or not 0 <= port <= 65_535:
        raise invalid_field("Address or Port", claim="is out of bounds")
    tags, meta = fields.get("Tags", list, []), fields.get("Meta", dict, {})
    if not all(isinstance(text, str) for text in (*tags, *meta.values())):
        raise invalid_field("Tags or Meta", claim="must hold strings")
    limits.check_tags(tags)
    limits.check_meta(meta)
    records = [*fields.get("Checks", list, [])]
    if (single := fields.get("Check", dict, {})) != {}:
        records.append(single)
    if len(records) > limits.CHECKS_PER_SERVICE_MAX:
        raise invalid_field("Checks", claim=f"holds at most {limits.CHECKS_PER_SERVICE_MAX}")
    checks = [_check(record, service_id, number) for number, record in enumerate(records, start=1)]
    if len({check.check_id for check in checks}) != len(checks):
        raise invalid_field("Checks", claim="must have different ids")
    return ServiceDefinition(
        service_id=service_id, name=name, address=address, port=port, tags=tuple(tags), meta=dict(meta), checks=checks
    )


def _check(record: object, service_id: str, number: int) -> CheckDefinition:
    fields = Fields(record, _CHECK_FIELDS, f"Checks[{number - 1}].")
    ttl_s = fields.duration_s("TTL", None)
    target, _, grpc_service = fields.get("GRPC", str, "").partition("/")
    interval_s = fields.duration_s("Interval", 0.0) or 0.0
    if (ttl_s is None) is (not target) or (ttl_s is not None and ttl_s <= 0):
        raise invalid_field(f"Checks[{number - 1}]", claim="must have either a TTL above 0 or a GRPC address")
    if target and interval_s < limits.INTERVAL_MIN_S:
        raise invalid_field(f"Checks[{number - 1}].Interval", claim=f"must be at least {limits.INTERVAL_MIN_S:g}s")
    kind = "grpc" if target else "ttl"
    after_s = fields.duration_s("DeregisterCriticalServiceAfter", None)
    return CheckDefinition(
        check_id=fields.get("CheckID", str, "") or f"service:{service_id}:{number}",
        name=fields.get("Name", str, "") or f"Service '{service_id}' check",
        kind=kind,
        first_status=fields.parsed("Status", Health, Health.CRITICAL),
        ttl_s=ttl_s,
        grpc_target=target,
        grpc_service=grpc_service,
        grpc_uses_tls=fields.get("GRPCUseTLS", bool, False),
        interval_s=interval_s,
        timeout_s=fields.duration_s("Timeout", None) or limits.CHECK_TIMEOUT_DEFAULT_S,
        deregister_after_s=max(after_s, limits.DEREGISTER_AFTER_MIN_S) if after_s else None,
    )


def heartbeat(body: bytes) -> tuple[Health, str]:
    """Returns the body of /v1/agent/check/update: status and output."""
    fields = Fields(_json(body), {"Status", "Output"})
    return fields.parsed("Status", Health, Health.PASSING), fields.get("Output", str, "")


def session_definition(body: bytes) -> SessionDefinition:
    """Returns the body of /v1/session/create. Consul ties sessions to checks of their node; those fields are accepted and ignored."""
    fields = Fields(_json(body) if body else {}, _SESSION_FIELDS)
    ttl_s = fields.duration_s("TTL", None)
    if ttl_s is not None and not limits.SESSION_TTL_MIN_S <= ttl_s <= limits.SESSION_TTL_MAX_S:
        raise invalid_field("TTL", claim=f"must be {limits.SESSION_TTL_MIN_S:g}s to {limits.SESSION_TTL_MAX_S:g}s")
    lock_delay_s = fields.duration_s("LockDelay", _LOCK_DELAY_DEFAULT_S)
    if lock_delay_s is None or lock_delay_s > limits.LOCK_DELAY_MAX_S:
        raise invalid_field("LockDelay", claim=f"must be at most {limits.LOCK_DELAY_MAX_S:g}s")
    if fields.get("Behavior", str, "") not in ("", "release"):
        raise invalid_field("Behavior", claim="must be release")
    return SessionDefinition(name=fields.get("Name", str, ""), ttl_s=ttl_s, lock_delay_s=lock_delay_s)


def number(text: str, field: str) -> int:
    """Returns a natural number in a query parameter."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise invalid_field(field, claim="must be a natural number")
    return int(text)


def wait_s(text: str | None) -> float:
    """Returns the longest wait of a blocking query. None: the query does not state one."""
    if text is None:
        return limits.WAIT_DEFAULT_S
    try:
        asked_s = duration_seconds(text)
    except ValueError:
        raise invalid_field("wait", claim="is not a duration") from None
    return min(asked_s, limits.WAIT_MAX_S) if asked_s > 0 and math.isfinite(asked_s) else limits.WAIT_DEFAULT_S


def _json(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequestError("Request decode failed: the body is not JSON", field="body") from None
