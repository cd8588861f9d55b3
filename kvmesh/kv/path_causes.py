"""The likely cause of a KV transfer that failed, in the words of `KV_PATH_REASONS`, for operators."""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from kvmesh.network.names import bare

REASONS: Mapping[str, str] = {
    "kv_pull_timeout": "timed_out",
    "kv_peer_lost": "unreachable",
    "kv_peer_overdue": "timed_out",
    "kv_handshake": "unreachable",
    "kv_incompatible": "incompatible",
    "kv_format": "incompatible",
}
"""Path reasons of failed pulls by the reason of their error."""
NOT_OF_THE_PATH = frozenset(
    ("kv_payload", "kv_pull_cancelled", "kv_prompt", "kv_stale", "kv_transport_closed", "kv_transport_starting")
)
"""Reasons of errors that are the handle's, the request's or this worker's own."""


@dataclass(frozen=True, slots=True)
class Cause:
    """`reason` is one of KV_PATH_REASONS; `detail` says it in a sentence, with addresses."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed pull. `reason` is its error's. `peer` is where the handle says that the KV is: a host, or NIXL's metadata of the source."""

    reason: str
    message: str
    peer: str | bytes = ""


def find_cause(failure: Failure, *, source_host: str, own_host: str) -> Cause | None:
    """Returns the cause of a failure. Hosts are those of the workers' gRPC services; empty: unknown. None: the path is not the cause."""
    if failure.reason in NOT_OF_THE_PATH:
        return None
    reason = REASONS.get(failure.reason, "failed")
    if reason not in ("incompatible", "failed") and _are_apart(source_host, own_host=own_host):
        if isinstance(failure.peer, str) and _is_local(failure.peer):
            return Cause(
                reason="loopback_address",
                detail=f"the prefill worker at {source_host} offers its KV at {failure.peer}, which only its own host reaches:"
                " set --vllm-side-channel-host there",
            )
        if not _offers(failure.peer, source_host):
            return Cause(
                reason=reason,
                detail=f"{failure.message}; the prefill worker at {source_host} does not offer its KV at that address:"
                " check UCX_NET_DEVICES there",
            )
    where = f" (prefill worker at {source_host})" if source_host else ""
    return Cause(reason=reason, detail=failure.message + where)


def find_own_fault(source: str | bytes, own_host: str) -> Cause | None:
    """Returns why workers on other hosts cannot pull the KV that this worker offers at `source` (see `Engine.kv_source`). None: they may be able
    to.

    `own_host` is the host of this worker's gRPC service. A worker on loopback has no peers on other hosts.
    """
    if not source or _is_local(own_host):
        return None
    if isinstance(source, str) and _is_local(bare(source.rpartition(":")[0])):
        return Cause(
            reason="loopback_address",
            detail=f"this worker offers its KV at {source}, which only its own host reaches: do not set --vllm-side-channel-host,"
            " or set it to this host's address",
        )
    if not _offers(source, own_host):
        return Cause(
            reason="unreachable",
            detail=f"UCX does not offer this worker's KV at {own_host}: UCX_NET_DEVICES must name the interface that has"
            " this address, or one on a network of all workers",
        )
    return None


def _are_apart(source_host: str, own_host: str) -> bool:
    """Returns True if the workers have different hosts, as far as their names show."""
    return bool(source_host and own_host) and source_host != own_host and not _is_local(source_host)


def _is_local(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and (address.is_loopback or address.is_unspecified))


def _offers(peer: str | bytes, source_host: str) -> bool:
    """Returns False if metadata does not contain the source's address.

    UCX packs addresses in network order, and omits those of loopback devices.
    """
    address = _address(source_host)
    return isinstance(peer, str) or not peer or address is None or address.packed in peer


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
