"""The agent's records of services and checks, and the change counter that they share with keys and sessions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.discovery.base import Health


class Counter:
    """Consul's index: grows with every change. Started at the time of day, it never repeats values of an earlier run."""

    def __init__(self, first: int = 1) -> None:
        self.value = max(1, first)

    def advance(self) -> int:
        """Returns the index of a new change."""
        self.value += 1
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDefinition:
    """One check. Exactly one of `ttl_s` and `grpc_target` is set, except for maintenance marks, which have neither.

    `grpc_target` is host:port. `grpc_service` is the name to ask its health server for; empty: the server as a whole.
    `deregister_after_s` None: never.
    """

    check_id: str
    name: str
    kind: str
    first_status: Health = Health.CRITICAL
    ttl_s: float | None = None
    grpc_target: str = ""
    grpc_service: str = ""
    grpc_uses_tls: bool = False
    interval_s: float = 0.0
    timeout_s: float = 0.0
    deregister_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDefinition:
    """One instance as registered."""

    service_id: str
    name: str
    address: str
    port: int
    tags: Sequence[str]
    meta: Mapping[str, str]
    checks: Sequence[CheckDefinition]


@dataclass(slots=True, kw_only=True)
class Check:
    """A check's state. `expires_at`: when the next heartbeat is overdue."""

    definition: CheckDefinition
    status: Health
    output: str = ""
    notes: str = ""
    expires_at: float | None = None
    critical_since: float | None = None
    create_index: int
    modify_index: int


@dataclass(slots=True, kw_only=True)
class Service:
    """An instance and its checks by id."""

    definition: ServiceDefinition
    checks: dict[str, Check] = field(default_factory=dict)
    create_index: int
    modify_index: int

    @property
    def is_passing(self) -> bool:
        """True when all checks pass, maintenance included."""
        return all(check.status is Health.PASSING for check in self.checks.values())
