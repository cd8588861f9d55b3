"""Which unit of an orchestrator runs which pool."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.checks import is_whole_number
from kvmesh.core import Role
from kvmesh.core.planning import PoolTarget
from kvmesh.errors import InvalidRequestError, NotFoundError

ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedPool:
    """`unit`: a service of docker compose, or a workload of Kubernetes. `workers_max` None: no limit."""

    model: str
    role: Role
    unit: str
    workers_max: int | None = None

    def limited(self, workers: int) -> int:
        return workers if self.workers_max is None else min(workers, self.workers_max)


def read_pools(entries: Sequence[str], *, field: str) -> Sequence[ManagedPool]:
    """Reads entries `MODEL/ROLE=UNIT` or `MODEL/ROLE=UNIT:MAX`. Raises InvalidRequestError for a malformed or repeated one."""
    pools: list[ManagedPool] = []
    for entry in entries:
        pool = _read(entry, field=field)
        if any((each.model, each.role) == (pool.model, pool.role) or each.unit == pool.unit for each in pools):
            raise InvalidRequestError(f"{entry!r}: this pool or unit occurs twice", field=field)
        pools.append(pool)
    if not pools:
        raise InvalidRequestError("names no pool; entries are MODEL/ROLE=UNIT or MODEL/ROLE=UNIT:MAX", field=field)
    return tuple(pools)


def _read(entry: str, field: str) -> ManagedPool:
    name, equals, unit = entry.partition("=")
    model, slash, role = name.rpartition("/")
    unit, colon, most = unit.partition(":")
    if not (equals and slash and model and unit) or role not in ROLES or (colon and not is_whole_number(most)):
        raise InvalidRequestError(f"{entry!r} is not MODEL/ROLE=UNIT or MODEL/ROLE=UNIT:MAX", field=field)
    if unit.startswith("-"):
        raise InvalidRequestError(f"{entry!r}: a unit does not start with a dash", field=field)
    return ManagedPool(model=model, role=Role(role), unit=unit, workers_max=int(most) if colon else None)


def pool_of(pools: Sequence[ManagedPool], target: PoolTarget) -> ManagedPool:
    """Raises NotFoundError if none is managed."""
    for pool in pools:
        if (pool.model, pool.role) == (target.model, target.role):
            return pool
    raise NotFoundError(
        f"no unit runs the {target.role.value} pool of {target.model}", reason="pool_not_found", field="pools"
    )
