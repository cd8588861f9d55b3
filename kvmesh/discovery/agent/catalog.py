"""Services and their checks: registration, heartbeats, check results, maintenance, expiry. No I/O; time is an argument.

1. A visible change (of a status, a definition, a mark) takes a new index; a new output alone does not, as in Consul.
2. The index of a name never goes backwards. A name without instances has the index at which any name last lost its only instance.
3. An overdue heartbeat makes its check critical; a check that was critical for `deregister_after_s` removes its instance.
"""

from collections.abc import Iterator

from kvmesh.discovery.agent.records import Check, CheckDefinition, Counter, Service, ServiceDefinition
from kvmesh.discovery.base import Health
from kvmesh.discovery.wire import SERVICE_MAINTENANCE
from kvmesh.errors import InvalidRequestError, NotFoundError, OverloadedError

_OUTPUT_LENGTH_MAX = 4096
_OVERDUE = "TTL expired"


class Catalog:
    """All services by id. `index` is that of the last change. Callers must not change `services`."""

    def __init__(self, counter: Counter, *, services_max: int) -> None:
        self._counter = counter
        self._services_max = services_max
        self.services: dict[str, Service] = {}
        self._service_of_check: dict[str, str] = {}
        self._name_index: dict[str, int] = {}
        self._last_extinction = counter.value
        self.index = counter.value

    def name_index(self, name: str) -> int:
        """Returns the index of the last change among the instances of a name."""
        return self._name_index.get(name, self._last_extinction)

    def instances(self, name: str) -> list[Service]:
        """Returns the instances of a name, by id."""
        found = [service for service in self.services.values() if service.definition.name == name]
        return sorted(found, key=lambda service: service.definition.service_id)

    def register(self, definition: ServiceDefinition, now: float) -> None:
        """Adds or replaces an instance. Checks with the same id and the drain mark keep their state, as in Consul."""
        service_id = definition.service_id
        old = self.services.get(service_id)
        if old is None and len(self.services) >= self._services_max:
            raise OverloadedError(f"the agent holds {self._services_max} services", reason="services_max")
        for check in definition.checks:
            if self._service_of_check.get(check.check_id, service_id) != service_id:
                raise InvalidRequestError(f"check {check.check_id} belongs to another service", field="CheckID")
        index = self._counter.advance()
        if old is not None:
            # Also forgets the checks that the new definition does not have.
            self._remove(old, index)
        service = Service(definition=definition, create_index=old.create_index if old else index, modify_index=index)
        for check_definition in definition.checks:
            known = old.checks.get(check_definition.check_id) if old else None
            service.checks[check_definition.check_id] = _check(check_definition, known, index, now=now)
        if old is not None:
            service.checks |= {i: check for i, check in old.checks.items() if i.startswith(SERVICE_MAINTENANCE)}
        self.services[service_id] = service
        self._service_of_check |= dict.fromkeys(service.checks, service_id)
        self._touch(definition.name, index)

    def deregister(self, service_id: str) -> bool:
        """Removes an instance. False: there was none."""
        service = self.services.get(service_id)
        if service is None:
            return False
        index = self._counter.advance()
        self._remove(service, index)
        self.index = index
        return True

    def heartbeat(self, check_id: str, status: Health, output: str, *, now: float) -> None:
        """Renews a TTL check. NotFoundError when there is none of this id."""
        check, service = self._found(check_id)
        ttl_s = check.definition.ttl_s if check is not None else None
        if check is None or service is None or ttl_s is None:
            raise NotFoundError(f'CheckID "{check_id}" does not have associated TTL')
        check.expires_at = now + ttl_s
        self._set(service, check=check, status=status, output=output, now=now)

    def record(self, check_id: str, status: Health, output: str, *, now: float) -> None:
        """Records the result of a gRPC check. Ignored when the check no longer exists."""
        check, service = self._found(check_id)
        if check is not None and service is not None:
            self._set(service, check=check, status=status, output=output, now=now)

    def set_maintenance(self, service_id: str, is_enabled: bool, reason: str) -> None:
        """Sets or removes the maintenance mark. A mark that is already set keeps its reason, as in Consul."""
        service = self.services.get(service_id)
        if service is None:
            raise NotFoundError(f'No service registered with ID "{service_id}"')
        check_id = f"{SERVICE_MAINTENANCE}{service_id}"
        if is_enabled is (check_id in service.checks):
            return
        index = self._counter.advance()
        if is_enabled:
            definition = CheckDefinition(check_id=check_id, name="Service Maintenance Mode", kind="maintenance")
            mark = Check(definition=definition, status=Health.CRITICAL, create_index=index, modify_index=index)
            mark.notes = reason or "Maintenance mode is enabled for this service, but no reason was provided."
            service.checks[check_id] = mark
            self._service_of_check[check_id] = service_id
        else:
            del service.checks[check_id]
            del self._service_of_check[check_id]
        self._touch(service.definition.name, index)

    def advance(self, now: float) -> None:
        """Applies everything that is due by `now`."""
        for service, check in list(self._all_checks()):
            if check.expires_at is not None and check.expires_at <= now:
                check.expires_at = None
                self._set(service, check=check, status=Health.CRITICAL, output=_OVERDUE, now=now)
        # A second pass, after checks became critical in the first one. A list, because `deregister` changes the services.
        for service, check in list(self._all_checks()):
            removal_at = _removal_at(check)
            if removal_at is not None and removal_at <= now:
                self.deregister(service.definition.service_id)

    def next_deadline(self) -> float | None:
        """When `advance` is due next; None: not until something changes."""
        times = (time for _, check in self._all_checks() for time in (check.expires_at, _removal_at(check)))
        return min((time for time in times if time is not None), default=None)

    def _all_checks(self) -> Iterator[tuple[Service, Check]]:
        return ((service, check) for service in self.services.values() for check in service.checks.values())

    def _found(self, check_id: str) -> tuple[Check | None, Service | None]:
        service = self.services.get(self._service_of_check.get(check_id, ""))
        return (service.checks.get(check_id), service) if service is not None else (None, None)

    def _set(self, service: Service, *, check: Check, status: Health, output: str, now: float) -> None:
        check.output = output[:_OUTPUT_LENGTH_MAX]
        if status is check.status:
            return
        check.status = status
        check.critical_since = now if status is Health.CRITICAL else None
        check.modify_index = self._counter.advance()
        self._touch(service.definition.name, check.modify_index)

    def _remove(self, service: Service, index: int) -> None:
        name = service.definition.name
        del self.services[service.definition.service_id]
        for check_id in service.checks:
            self._service_of_check.pop(check_id, None)
        if any(other.definition.name == name for other in self.services.values()):
            self._name_index[name] = index
        else:
            self._name_index.pop(name, None)
            self._last_extinction = index

    def _touch(self, name: str, index: int) -> None:
        self._name_index[name] = self.index = index


def _check(definition: CheckDefinition, known: Check | None, index: int, *, now: float) -> Check:
    status = known.status if known is not None else definition.first_status
    check = Check(
        definition=definition,
        status=status,
        output=known.output if known is not None else "",
        create_index=known.create_index if known is not None else index,
        modify_index=index,
    )
    if definition.ttl_s is not None and status is not Health.CRITICAL:
        check.expires_at = now + definition.ttl_s
    if status is Health.CRITICAL:
        check.critical_since = now if known is None or known.critical_since is None else known.critical_since
    return check


def _removal_at(check: Check) -> float | None:
    after_s = check.definition.deregister_after_s
    if after_s is None or check.critical_since is None:
        return None
    return check.critical_since + after_s
