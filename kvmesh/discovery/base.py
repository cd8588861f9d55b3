"""The registry as the mesh sees it: services, drain marks, keys, sessions.

One interface, two implementations that pass the same conformance suite: `consul.py` speaks Consul's HTTP API, and
`embedded.py` is an agent for one machine that serves the same API, so that there is one client code path.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

FRONTEND = "kvmesh-frontend"
ROUTER = "kvmesh-router"
PREFILL = "kvmesh-prefill"
DECODE = "kvmesh-decode"
PLANNER = "kvmesh-planner"
SERVICES = (FRONTEND, ROUTER, PREFILL, DECODE, PLANNER)


class Health(StrEnum):
    """Worst of an instance's checks, drain mark aside."""

    PASSING = "passing"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What an instance says of itself. `instance_id` is unique in the registry; `host:port` serves gRPC.

    The registry checks grpc.health.v1 at that address every `check_interval_s` (Consul: at least 1 s), and expects a
    heartbeat at least every `ttl_s`; an instance critical for `deregister_after_s` is forgotten (at least 60 s; Consul
    looks every 30 s).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One registered instance as last seen. `notes`: the drain mark's reason, or the heartbeat's note.

    A note that changes without the health may be some minutes old.
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
        """host:port of its gRPC server."""
        return f"{self.host}:{self.port}"

    @property
    def takes_requests(self) -> bool:
        """True when it passes its checks and has no drain mark."""
        return self.health is Health.PASSING and not self.is_draining


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All instances of one service, by id. `is_stale`: the registry cannot be reached; this is the last good view."""

    service: str
    index: int
    instances: Sequence[Instance]
    is_stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key's value. `modify_index` is what compare-and-set compares; `session` holds the lock, if any."""

    key: str
    value: bytes
    modify_index: int
    session: str = ""


class Registry(Protocol):
    """The registry. Every call has its own deadline (a setting); UnavailableError when it cannot be reached."""

    async def register(self, registration: Registration) -> None:
        """Adds or replaces an instance; its TTL check starts critical until the first heartbeat."""
        ...

    async def deregister(self, instance_id: str) -> None:
        """Removes an instance. Idempotent."""
        ...

    async def heartbeat(self, instance_id: str, *, health: Health = Health.PASSING, note: str = "") -> None:
        """Renews the TTL check. NotFoundError when the registry has forgotten the instance: register again."""
        ...

    async def set_draining(self, instance_id: str, is_draining: bool, *, reason: str = "") -> None:
        """Sets or takes off the drain mark (Consul: maintenance mode of the service). Idempotent.

        NotFoundError when the registry has forgotten the instance.
        """
        ...

    async def instances(self, service: str) -> View:
        """All instances of a service now, whatever their health."""
        ...

    def watch(self, service: str) -> AsyncGenerator[View, None]:
        """The view now and after every change; goes on through outages with the last good view marked stale, once.

        An outage at the start gives an empty stale view. Never ends by itself; closing the generator (`aclosing`) frees
        its connection.
        """
        ...

    async def get(self, key: str) -> Entry | None:
        """A key's value, or None."""
        ...

    async def list_keys(self, prefix: str) -> Sequence[Entry]:
        """All entries under a prefix, by key."""
        ...

    async def put(self, key: str, value: bytes, *, expected_index: int | None = None) -> bool:
        """Sets a value. With `expected_index` only if the key's modify_index equals it (0: absent); False if not.

        After UnavailableError the value may have been set or not.
        """
        ...

    async def delete(self, key: str) -> None:
        """Removes a key. Idempotent."""
        ...

    async def create_session(self, *, name: str, ttl_s: float, lock_delay_s: float = 0.0) -> str:
        """Makes a session that ends `ttl_s` (10 to 86 400) after its last renewal and then releases its locks.

        Consul may take up to twice that. Then nobody takes these locks for `lock_delay_s` (0 to 60).
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
        """Gives the lock back. False: the session did not hold it."""
        ...

    async def aclose(self) -> None:
        """Ends all watches and connections. Idempotent."""
        ...
