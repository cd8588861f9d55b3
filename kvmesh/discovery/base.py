"""The registry's interface: services, drain marks, keys, sessions.

`consul.py` implements it over Consul's HTTP API. `embedded.py` is an agent for one machine that serves the same API, so that there
is one client. Both pass the same conformance suite.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from typing import Protocol

from kvmesh.network.names import host_port

FRONTEND = "kvmesh-frontend"
ROUTER = "kvmesh-router"
PREFILL = "kvmesh-prefill"
DECODE = "kvmesh-decode"
PLANNER = "kvmesh-planner"
KVMESH_VERSION = version("kvmesh")
VERSION_KEY = "kvmesh_version"
"""Registry meta of every service."""
LABEL_PREFIX = "label-"
"""Of keys of meta values: `label-zone: a` is the label zone=a."""
ROLE_SEQUENCE_KEY = "role_sequence"
"""Key of the meta value that counts how often a worker has changed its role. The views of two pools arrive in any order."""
SERVICES = (FRONTEND, ROUTER, PREFILL, DECODE, PLANNER)


class Health(StrEnum):
    """The worst status among an instance's checks. The drain mark does not count."""

    PASSING = "passing"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An instance as it registers itself. `instance_id` is unique in the registry; `host:port` serves gRPC.

    The registry checks grpc.health.v1 at that address every `check_interval_s` (Consul: at least 1 s) and expects a heartbeat at
    least every `ttl_s`. It removes an instance that was critical for `deregister_after_s` (at least 60 s; Consul checks every 30 s).
    `meta` holds at most 64 pairs, values of at most 512 characters (Consul's limits).
    """

    service: str
    instance_id: str
    host: str
    port: int
    meta: Mapping[str, str] = field(default_factory=dict)
    tags: Sequence[str] = ()
    check_interval_s: float = 2.0
    ttl_s: float = 6.0
    deregister_after_s: float = 120.0
    uses_tls: bool = False
    is_checked: bool = True
    """False: the registry does not check gRPC health, because it could not verify the server. Heartbeats remain."""


ROLE_CHANGE = "role change to "
"""Begins the drain mark's reason of a worker that changes its role; the new role follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One registered instance. `notes` is the drain mark's reason, or the heartbeat's note.

    Consul may publish a new note minutes late if the health does not change.
    """

    service: str
    instance_id: str
    host: str
    port: int
    meta: Mapping[str, str]
    tags: Sequence[str]
    health: Health
    is_draining: bool
    notes: str = ""

    @property
    def address(self) -> str:
        """host:port of its gRPC server, with an IPv6 address in brackets."""
        return host_port(self.host, self.port)

    @property
    def takes_requests(self) -> bool:
        """True when all checks pass and there is no drain mark."""
        return self.health is Health.PASSING and not self.is_draining

    @property
    def next_role(self) -> str:
        """The role that a worker is changing to. Empty: it keeps its role."""
        is_changing = self.is_draining and self.notes.startswith(ROLE_CHANGE)
        return self.notes.removeprefix(ROLE_CHANGE) if is_changing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All instances of one service, by id. `is_stale`: the registry is unreachable and this is the last good view."""

    service: str
    index: int
    instances: Sequence[Instance]
    is_stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key's value. Compare-and-set compares `modify_index`; `session` is the lock's holder, empty when there is none."""

    key: str
    value: bytes
    modify_index: int
    session: str = ""


class Registry(Protocol):
    """The registry. Every call has a deadline (a setting). UnavailableError when the registry cannot be reached."""

    async def register(self, registration: Registration) -> None:
        """Adds or replaces an instance; its TTL check starts critical until the first heartbeat."""
        ...

    async def deregister(self, instance_id: str) -> None:
        """Removes an instance. Idempotent."""
        ...

    async def heartbeat(self, instance_id: str, *, health: Health = Health.PASSING, note: str = "") -> None:
        """Renews the TTL check. NotFoundError when the registry does not list the instance: register again."""
        ...

    async def set_draining(self, instance_id: str, is_draining: bool, *, reason: str = "") -> None:
        """Sets or removes the drain mark (Consul: maintenance mode of the service). Idempotent.

        NotFoundError when the registry does not list the instance.
        """
        ...

    async def instances(self, service: str) -> View:
        """Returns all instances of a service, whatever their health."""
        ...

    def watch(self, service: str) -> AsyncGenerator[View, None]:
        """Yields the present view, then one after every change. An outage yields the last good view once, marked stale.

        An outage at the start yields an empty stale view. The iteration never ends on its own; closing the generator (`aclosing`) frees
        its connection.
        """
        ...

    async def get(self, key: str) -> Entry | None:
        """Returns a key's value, or None."""
        ...

    async def put(self, key: str, value: bytes, *, expected_index: int | None = None) -> bool:
        """Sets a value; with `expected_index` only if the key's modify_index equals it (0: absent). Returns whether it was set.

        After UnavailableError the value may or may not be set.
        """
        ...

    async def delete(self, key: str) -> None:
        """Removes a key. Idempotent."""
        ...

    async def create_session(self, *, name: str, ttl_s: float, lock_delay_s: float = 0.0) -> str:
        """Creates a session that expires `ttl_s` (10 to 86 400) after its last renewal and then releases its locks.

        Consul may take up to twice that. Nobody can take these locks for another `lock_delay_s` (0 to 60).
        """
        ...

    async def renew_session(self, session_id: str) -> None:
        """Renews a session. NotFoundError when it is gone."""
        ...

    async def destroy_session(self, session_id: str) -> None:
        """Ends a session and releases its locks. Idempotent."""
        ...

    async def acquire(self, key: str, session_id: str, value: bytes = b"") -> bool:
        """Takes a key's lock for a session. False: another session holds it. NotFoundError: the session is gone."""
        ...

    async def release(self, key: str, session_id: str) -> bool:
        """Releases the lock. False: the session did not hold it."""
        ...

    async def aclose(self) -> None:
        """Ends all watches and connections. Idempotent."""
        ...
