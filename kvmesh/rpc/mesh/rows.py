"""Workers and pools of a mesh as rows of tables: what the registry, the router and the planner say of each. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvmesh.core import LoadRecord, Role, WorkerView
from kvmesh.core.planning import PlanReport
from kvmesh.discovery.base import DECODE, PREFILL, Health, Instance
from kvmesh.rpc.mesh.view import MeshView
from kvmesh.rpc.router.explanations import worker_name

OK, JOINING, DRAINING, CRITICAL, PATHS_LOST = "ok", "joining", "draining", "critical", "paths lost"
ROLES = {PREFILL: Role.PREFILL, DECODE: Role.DECODE}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A worker, or one data-parallel rank of it. `load` None: no load is known. Rates None: not known yet.

    `state`: ok, or why it gets no requests.
    """

    name: str
    role: str
    model: str
    engine: str = ""
    version: str = ""
    address: str = ""
    state: str = JOINING
    note: str = ""
    trust: str = ""
    breaker: str = ""
    load: LoadRecord | None = None
    requests_in_flight: int = 0
    index_blocks: int = 0
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None

    @property
    def kv_usage(self) -> float | None:
        """Share of the KV blocks in use. None: not known."""
        return self.load.kv_blocks_used / self.load.kv_blocks_total if self.load and self.load.kv_blocks_total else None

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that were in the worker's cache, since it started. None: it had no prompt."""
        if self.load is None:
            return None
        load = self.load
        tokens = load.prompt_tokens_total + load.cached_tokens_total + load.transferred_tokens_total
        return load.cached_tokens_total / tokens if tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """The workers of one model and role. `workers_planned` None: the planner wants nothing of this pool."""

    model: str
    role: str
    workers: int = 0
    workers_ready: int = 0
    workers_planned: int | None = None
    running_requests: int = 0
    waiting_requests: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0


def worker_rows(view: MeshView, earlier: Mapping[str, WorkerRow] | None = None) -> Sequence[WorkerRow]:
    """Returns the workers that the registry lists or the router knows, by pool and name. Rates are the change since `earlier`."""
    instances = {each.instance_id: each for service in ROLES for each in view.instances.get(service, ())}
    rows = [_seen(each, instances.get(each.worker.worker_id)) for each in view.workers]
    seen = {each.worker.worker_id for each in view.workers}
    rows += [_listed(each) for each in instances.values() if each.instance_id not in seen]
    known = earlier or {}
    return sorted(
        (_with_rates(row, known.get(row.name)) for row in rows), key=lambda row: (row.model, row.role, row.name)
    )


def pool_rows(rows: Iterable[WorkerRow], plan: PlanReport | None) -> Sequence[PoolRow]:
    """Returns the pools of the workers, and those that the planner wants and that have no workers."""
    pools: dict[tuple[str, str], PoolRow] = {}
    for row in rows:
        key = row.model, row.role
        pools[key] = _add(pools.get(key) or PoolRow(model=row.model, role=row.role), row)
    for report in plan.pools if plan is not None else ():
        key = report.model, report.role.value
        if key in pools or report.workers_planned:
            pool = pools.get(key) or PoolRow(model=report.model, role=report.role.value)
            pools[key] = replace(pool, workers_planned=report.workers_planned)
    return [pools[key] for key in sorted(pools)]


def _add(pool: PoolRow, row: WorkerRow) -> PoolRow:
    load = row.load or LoadRecord()
    return replace(
        pool,
        workers=pool.workers + 1,
        workers_ready=pool.workers_ready + (row.state in (OK, PATHS_LOST)),
        running_requests=pool.running_requests + load.running_requests,
        waiting_requests=pool.waiting_requests + load.waiting_requests,
        kv_blocks_used=pool.kv_blocks_used + load.kv_blocks_used,
        kv_blocks_total=pool.kv_blocks_total + load.kv_blocks_total,
        output_tokens_per_s=pool.output_tokens_per_s + (row.output_tokens_per_s or 0.0),
        prompt_tokens_per_s=pool.prompt_tokens_per_s + (row.prompt_tokens_per_s or 0.0),
    )


def _seen(view: WorkerView, instance: Instance | None) -> WorkerRow:
    meta = instance.meta if instance is not None else {}
    return WorkerRow(
        name=worker_name(view.worker),
        role=view.role.value,
        model=view.model,
        engine=meta.get("engine", ""),
        version=meta.get("kvmesh_version", ""),
        address=view.worker.address,
        state=_state(view, instance),
        note=_note(instance),
        trust=f"{view.trust} ({view.trust_reason})" if view.trust_reason else view.trust,
        breaker=view.breaker,
        load=view.load,
        requests_in_flight=view.requests_in_flight,
        index_blocks=view.index_blocks,
    )


def _listed(instance: Instance) -> WorkerRow:
    """Returns a worker that the router has not described: it is starting, or there is no router."""
    return WorkerRow(
        name=instance.instance_id,
        role=ROLES[instance.service].value,
        model=instance.meta.get("model", ""),
        engine=instance.meta.get("engine", ""),
        version=instance.meta.get("kvmesh_version", ""),
        address=instance.address,
        state=_registry_state(instance) or JOINING,
        note=_note(instance),
    )


def _state(view: WorkerView, instance: Instance | None) -> str:
    known = _registry_state(instance) if instance is not None else ""
    return known or view.excluded_by or (PATHS_LOST if view.paused_frontend_ids else OK)


def _registry_state(instance: Instance) -> str:
    if instance.health is Health.CRITICAL:
        return CRITICAL
    return DRAINING if instance.is_draining else ""


def _note(instance: Instance | None) -> str:
    return instance.notes if instance is not None and not instance.takes_requests else ""


def _with_rates(row: WorkerRow, earlier: WorkerRow | None) -> WorkerRow:
    output, prompt = token_rates(row.load, earlier.load if earlier is not None else None)
    return replace(row, output_tokens_per_s=output, prompt_tokens_per_s=prompt)


def token_rates(load: LoadRecord | None, earlier: LoadRecord | None) -> tuple[float | None, float | None]:
    """Output and prompt tokens per second, by the worker's clock. None: not known, as after a restart of the worker.

    An idle worker sends no newer record; its rates are 0.
    """
    if load is None or earlier is None or earlier.epoch != load.epoch:
        return None, None
    elapsed_s = load.taken_at_s - earlier.taken_at_s
    if elapsed_s <= 0:
        return 0.0, 0.0
    output = load.output_tokens_total - earlier.output_tokens_total
    prompt = load.prompt_tokens_total - earlier.prompt_tokens_total
    return output / elapsed_s, prompt / elapsed_s


def by_name(rows: Iterable[WorkerRow]) -> Mapping[str, WorkerRow]:
    """Returns the rows of a view, for the rates of the next one."""
    return {row.name: row for row in rows}
