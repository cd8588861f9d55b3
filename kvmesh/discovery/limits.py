"""Consul's limits, checked before a call so that the error names the field."""

import math
import re
from collections.abc import Mapping, Sequence

from kvmesh.discovery.base import Registration
from kvmesh.errors import InvalidRequestError

META_PAIRS_MAX = 64
META_KEY_LENGTH_MAX = 128
VALUE_BYTES_MAX = 512 * 1024
"""Largest value of a key: Consul's own limit."""
META_VALUE_BYTES_MAX = 512
TAGS_MAX = 64
TAG_LENGTH_MAX = 255
KEY_BYTES_MAX = 512
NOTE_LENGTH_MAX = 1024
SESSION_TTL_MIN_S = 10.0
SESSION_TTL_MAX_S = 86_400.0
LOCK_DELAY_MAX_S = 60.0
DEREGISTER_AFTER_MIN_S = 60.0
"""With a shorter time a brief outage would remove instances."""
WAIT_DEFAULT_S = 300.0
WAIT_MAX_S = 600.0
"""Longest wait of a blocking query."""
CHECK_TIMEOUT_DEFAULT_S = 10.0
"""Timeout of a gRPC check that does not state one."""
CHECKS_PER_SERVICE_MAX = 8
INTERVAL_MIN_S = 0.05

# A DNS label, so that Consul's DNS interface can serve the name too.
_SERVICE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
# An id is part of a path and of check ids.
_INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_META_KEY = re.compile(r"[A-Za-z0-9_-]+")


def check_registration(registration: Registration) -> None:
    """InvalidRequestError for the first field that Consul would refuse, or accept and check wrongly."""
    check_service(registration.service)
    check_instance_id(registration.instance_id)
    if not registration.host or len(registration.host) > 255 or any(c.isspace() for c in registration.host):
        raise invalid_field("host", claim="must be a host name or an address")
    if not 1 <= registration.port <= 65_535:
        raise invalid_field("port", claim=f"must be 1 to 65535, not {registration.port}")
    check_meta(registration.meta)
    check_tags(registration.tags)
    check_between("check_interval_s", registration.check_interval_s, low=INTERVAL_MIN_S, high=math.inf)
    check_between("ttl_s", registration.ttl_s, low=INTERVAL_MIN_S, high=math.inf)
    check_between("deregister_after_s", registration.deregister_after_s, low=DEREGISTER_AFTER_MIN_S, high=math.inf)


def check_service(service: str) -> None:
    if not _SERVICE_NAME.fullmatch(service):
        raise invalid_field("service", claim="must be 1 to 63 letters, digits and inner dashes")


def check_instance_id(instance_id: str) -> None:
    if not _INSTANCE_ID.fullmatch(instance_id):
        raise invalid_field(
            "instance_id", claim="must be 1 to 128 letters, digits, dots, colons, dashes and underscores"
        )


def check_meta(meta: Mapping[str, str]) -> None:
    """Consul counts a value's UTF-8 bytes, although its documentation says characters."""
    if len(meta) > META_PAIRS_MAX:
        raise invalid_field("meta", claim=f"holds at most {META_PAIRS_MAX} pairs, not {len(meta)}")
    for key, value in meta.items():
        if len(key) > META_KEY_LENGTH_MAX or not _META_KEY.fullmatch(key):
            raise invalid_field(
                f"meta.{key[:META_KEY_LENGTH_MAX]}", claim="has a key that is not 1 to 128 letters, digits, _ and -"
            )
        if len(value.encode()) > META_VALUE_BYTES_MAX:
            raise invalid_field(
                f"meta.{key}", claim=f"holds at most {META_VALUE_BYTES_MAX} bytes, not {len(value.encode())}"
            )


def check_tags(tags: Sequence[str]) -> None:
    if len(tags) > TAGS_MAX:
        raise invalid_field("tags", claim=f"holds at most {TAGS_MAX}, not {len(tags)}")
    if any(not tag or len(tag) > TAG_LENGTH_MAX for tag in tags):
        raise invalid_field("tags", claim=f"must each be 1 to {TAG_LENGTH_MAX} characters")


def check_key(key: str, *, field: str = "key") -> None:
    """Checks a key or, for `field` "prefix", a prefix, which may be empty and may end with a slash.

    Consul's HTTP server redirects a path with empty or dotted segments to another key.
    """
    if field == "key" and not key:
        raise invalid_field(field, claim="must not be empty")
    if len(key.encode()) > KEY_BYTES_MAX:
        raise invalid_field(field, claim=f"holds at most {KEY_BYTES_MAX} bytes")
    segments = key.split("/")
    if key and (
        any(s in (".", "..") for s in segments) or "" in segments[:-1] or (field == "key" and not segments[-1])
    ):
        raise invalid_field(field, claim="must have no empty or dotted segments")


def check_value(value: bytes) -> None:
    if len(value) > VALUE_BYTES_MAX:
        raise invalid_field("value", claim=f"holds at most {VALUE_BYTES_MAX} bytes, not {len(value)}")


def check_between(field: str, number: float, *, low: float, high: float) -> None:
    """A finite number within bounds, both included."""
    if not math.isfinite(number) or not low <= number <= high:
        raise invalid_field(
            field, claim=f"must be at least {low:g}" + (f" and at most {high:g}" if math.isfinite(high) else "")
        )


def invalid_field(field: str, claim: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} {claim}", field=field)
