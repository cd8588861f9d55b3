"""What the agent keeps of services and checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.discovery.base import Health


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDefinition:
    """One check. Exactly one of `ttl_s` and `grpc_target` is set, except for maintenance marks, which have neither."""

    check_id: str
    name: str
    kind: str
    first_status: Health = Health.CRITICAL
    ttl_s: float | None = None
    # host:port, and behind a slash the service that the health server is asked for; "" is the server itself.
    grpc_target: str = ""
    grpc_service: str = ""
    grpc_uses_tls: bool = False
    interval_s: float = 0.0
    timeout_s: float = 0.0
    # None: never.
    deregister_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDefinition:
    """One instance as it registered."""

    service_id: str
    name: str
    address: str
    port: int
    tags: Sequence[str]
    meta: Mapping[str, str]
    checks: Sequence[CheckDefinition]


@dataclass(slots=True, kw_only=True)
class Check:
    """A check's state. `expires_at`: when a heartbeat is overdue."""

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
