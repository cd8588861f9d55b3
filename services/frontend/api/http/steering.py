"""Request headers that set the session, the deadline, the trace, and, if allowed, the workers of a request."""

import math
from dataclasses import replace
from typing import Any

from kvmesh.checks import TRACEPARENT_BYTES_MAX
from kvmesh.errors import InvalidRequestError, PermissionDeniedError
from kvmesh.telemetry import is_traceparent
from services.frontend.api.http.exchange import Exchange
from services.frontend.pipeline.request import Request

SESSION, TIMEOUT, TRACE = "x-session-id", "x-request-timeout", "traceparent"
PIN_PREFILL, PIN_DECODE = "x-kvmesh-pin-prefill", "x-kvmesh-pin-decode"
LABELS, PREFERRED_LABELS = "x-kvmesh-labels", "x-kvmesh-preferred-labels"
PLACES = {
    PIN_PREFILL: "pinned_prefill_worker_id",
    PIN_DECODE: "pinned_decode_worker_id",
    LABELS: "required_labels",
    PREFERRED_LABELS: "preferred_labels",
}
"""Headers that choose workers, and the fields of Request that they set."""
SESSION_BYTES_MAX = 256
WORKER_CHARACTERS_MAX = 128
LABELS_MAX = 16


def steer(request: Request, exchange: Exchange) -> Request:
    """Returns the request with the fields that its headers set. Errors name the header."""
    headers = exchange.request.headers
    found: dict[str, Any] = {}
    trace = headers.get(TRACE, "")
    # Headers can have bytes that are not UTF-8; messages between services cannot.
    if trace and len(trace) <= TRACEPARENT_BYTES_MAX and is_traceparent(trace):
        found["traceparent"] = trace
    if session := headers.get(SESSION, ""):
        found["session_id"] = _limited(SESSION, value=session, bytes_max=SESSION_BYTES_MAX)
    if timeout := headers.get(TIMEOUT, ""):
        found["timeout_s"] = _seconds(timeout)
    names: dict[str, str] = {}
    for header, field in PLACES.items():
        if value := headers.get(header, ""):
            if not exchange.settings.allows_pins:
                raise PermissionDeniedError(f"{header} is not allowed here", field=header, reason="pins_not_allowed")
            is_labels = header in (LABELS, PREFERRED_LABELS)
            found[field] = (
                _labels(header, value=value)
                if is_labels
                else _limited(header, value=value, bytes_max=WORKER_CHARACTERS_MAX)
            )
            names[field] = header
    if names:
        found["fields"] = {**request.fields, **names}
    return replace(request, **found) if found else request


def _limited(header: str, value: str, bytes_max: int) -> str:
    if len(value.encode("utf-8", "surrogateescape")) > bytes_max or not value.isprintable():
        raise InvalidRequestError(f"{header} must have at most {bytes_max} printable characters", field=header)
    return value


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequestError(f"{TIMEOUT} must be a number of seconds above 0", field=TIMEOUT)
    return seconds


def _labels(header: str, value: str) -> dict[str, str]:
    pairs = [part.strip().partition("=") for part in _limited(header, value=value, bytes_max=1024).split(",")]
    if len(pairs) > LABELS_MAX or not all(name and found and text for name, found, text in pairs):
        raise InvalidRequestError(
            f"{header} must be at most {LABELS_MAX} entries name=value, separated by commas", field=header
        )
    return {name: text for name, _, text in pairs}
