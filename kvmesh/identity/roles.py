"""Roles, and the names in certificates that state them."""

import re
from enum import StrEnum


class MeshRole(StrEnum):
    """What a member of the mesh is. The scaler starts and stops workers for the planner; the operator is a person with a tool."""

    FRONTEND = "frontend"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    PLANNER = "planner"
    SCALER = "scaler"
    REGISTRY = "registry"
    OPERATOR = "operator"


SERVER_NAME = "member.kvmesh"
"""The DNS name in certificates of services. Clients expect it whatever address they connect to, so certificates name no hosts.
The certificates of frontends, the registry and operators lack it: they cannot serve the mesh's methods."""
SERVING = frozenset({MeshRole.ROUTER, MeshRole.PREFILL, MeshRole.DECODE, MeshRole.PLANNER, MeshRole.SCALER})
_URI = re.compile(r"spiffe://[^/]+/(?:.+/)?svc/kvmesh-([a-z]+)")
"""SPIFFE ids; Consul Connect's ids of the mesh's services match too."""


def uri_of(role: MeshRole) -> str:
    """The URI in the certificates of a role."""
    return f"spiffe://kvmesh/svc/kvmesh-{role}"


def role_of(uri: str) -> MeshRole | None:
    """The role that a certificate's URI names; None: none of the mesh's."""
    found = _URI.fullmatch(uri)
    return MeshRole(found[1]) if found is not None and found[1] in set(MeshRole) else None
