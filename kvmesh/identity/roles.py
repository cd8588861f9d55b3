"""Roles, and the names in certificates: which one a client expects of a server, and which role a client's certificate states."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvmesh.errors import InvalidRequestError

SERVICE_PREFIX = "kvmesh-"
"""Of the mesh's services in Consul."""
# `ap` is an admin partition of Consul Enterprise.
_CONNECT_URI = re.compile(r"(spiffe://([^/?#]+)/(?:ap/[^/?#]+/)?ns/([^/?#]+)/dc/[^/?#]+)/svc/([^/?#]+)")
_TRUST_DOMAIN_LENGTH = 8
"""Consul cuts the trust domain in common names."""


class MeshRole(StrEnum):
    """The role of a member of the mesh. The scaler starts and stops workers for the planner; operators are people who use the command line."""

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
    """Returns the URI in the certificates of a role."""
    return f"spiffe://kvmesh/svc/kvmesh-{role}"


def role_of(uri: str) -> MeshRole | None:
    """Returns the role that a certificate's URI names; None: none of the mesh's."""
    found = _URI.fullmatch(uri)
    return MeshRole(found[1]) if found is not None and found[1] in set(MeshRole) else None


class PeerNames(Protocol):
    """The naming rules of one source of certificates."""

    def server_name(self, role: MeshRole) -> str:
        """Returns the name that the certificate of a server with the role must have. Empty: gRPC cannot compare it, see `server_uri`."""
        ...

    def server_uri(self, role: MeshRole) -> str:
        """Returns the only SPIFFE ID that a server with the role may have. Empty: any member that may serve."""
        ...

    def role_of(self, uri: str) -> MeshRole | None:
        """Returns the role that a peer's URI states; None: the peer is not a member."""
        ...


@dataclass(frozen=True, slots=True)
class FileNames:
    """Certificates of an authority of the mesh's own: one DNS name for all that serve."""

    def server_name(self, role: MeshRole) -> str:
        return SERVER_NAME

    def server_uri(self, role: MeshRole) -> str:
        return ""

    def role_of(self, uri: str) -> MeshRole | None:
        return role_of(uri)


FILE_NAMES = FileNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectNames:
    """Certificates of Consul Connect. Members have the trust domain, namespace and data centre of this one's.

    gRPC compares DNS names and common names, not URIs. Consul made common names until 1.10; later certificates have the URI only.
    """

    prefix: str
    """The SPIFFE ID up to `/svc/`."""
    domain: str
    """The end of common names; empty: certificates have none."""

    def server_name(self, role: MeshRole) -> str:
        return _common_name(role, self.domain) if self.domain else ""

    def server_uri(self, role: MeshRole) -> str:
        return f"{self.prefix}/svc/{SERVICE_PREFIX}{role}"

    def role_of(self, uri: str) -> MeshRole | None:
        start = f"{self.prefix}/svc/{SERVICE_PREFIX}"
        word = uri.removeprefix(start) if uri.startswith(start) else ""
        return MeshRole(word) if word in set(MeshRole) else None


def connect_names(uri: str, common_name: str, role: MeshRole) -> ConnectNames:
    """Returns the names of the members of a mesh, by one member's own certificate. InvalidRequestError when it is not the role's."""
    found = _CONNECT_URI.fullmatch(uri)
    if found is None or found[4] != SERVICE_PREFIX + role:
        raise InvalidRequestError(
            f"the certificate is for {uri[:256]!r}, not for the service {SERVICE_PREFIX}{role}",
            reason="certificate_of_another",
            field="mesh.identity",
        )
    domain = f"svc.{found[3]}.{found[2][:_TRUST_DOMAIN_LENGTH]}.consul"
    has_names = common_name == _common_name(role, domain)
    return ConnectNames(prefix=found[1], domain=domain if has_names else "")


def _common_name(role: MeshRole, domain: str) -> str:
    """Consul's rule: the service's name without characters other than letters and digits."""
    return f"{SERVICE_PREFIX.rstrip('-')}{role}.{domain}"
