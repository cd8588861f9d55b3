"""The workers as the router sees them: registry entry, description, load, and work placed on them. No I/O.

One owner changes this state, on one event loop: membership tells what the registry and the streams say, the reservation
book tells what is in flight. `version` counts up whenever a worker may enter or leave a pool.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.core import Handoff, LoadRecord, Role, WorkerDescription, WorkerRef
from services.router.health.monitor import Health, HealthSettings
from services.router.index.kv_feed import KvFeed, KvIndex
from services.router.workers.board import Board
from services.router.workers.coefficients import Coefficients
from services.router.workers.cost_settings import CostSettings
from services.router.workers.target import Target, TargetLimits

CONNECTING = "unreachable"
"""Why a worker gets no requests until its streams stand, and whenever they break."""


@dataclass(slots=True, eq=False)
class Worker:
    """One registered worker. `stream_fault` is empty exactly while its watches stand; `health_fault` belongs to `Health`."""

    worker_id: str
    address: str
    role: Role
    labels: Mapping[str, str] = field(default_factory=dict)
    is_critical: bool = False
    is_marked_draining: bool = False
    is_draining_itself: bool = False
    stream_fault: str = CONNECTING
    health_fault: str = ""
    description: WorkerDescription | None = None
    block_size_tokens: int = 1
    targets: list[Target] = field(default_factory=list)
    feed: KvFeed | None = None

    @property
    def excluded_by(self) -> str:
        """Why it gets no requests; empty: it gets some."""
        if self.is_marked_draining or self.is_draining_itself:
            return "draining"
        if self.is_critical:
            return "critical"
        return self.stream_fault or self.health_fault

    @property
    def pairs_as(self) -> tuple[str, Handoff] | None:
        """Workers exchange KV exactly when this is equal. None: never."""
        description = self.description
        if description is None or not description.kv_compatibility_hash or not description.capabilities.handoffs:
            return None
        return description.kv_compatibility_hash, description.capabilities.handoffs[0]


class Fleet:
    """All known workers."""

    def __init__(
        self,
        index: KvIndex,
        cost: CostSettings | None = None,
        target_limits: TargetLimits | None = None,
        health: HealthSettings | None = None,
    ) -> None:
        self.index = index
        self.board = Board()
        self._cost = cost or CostSettings()
        self._target_limits = target_limits or TargetLimits()
        self.workers: dict[str, Worker] = {}
        self.version = 0
        self.health = Health(health or HealthSettings(), self.workers, self._pools_changed)

    def targets(self) -> Iterable[Target]:
        """All ranks of all described workers."""
        return (target for worker in self.workers.values() for target in worker.targets)

    def registered(
        self,
        worker_id: str,
        *,
        address: str,
        role: Role,
        labels: Mapping[str, str],
        is_critical: bool,
        is_draining: bool,
    ) -> Worker:
        """The registry lists the worker like this now."""
        worker = self.workers.get(worker_id)
        if worker is None:
            worker = self.workers[worker_id] = Worker(worker_id=worker_id, address=address, role=role)
        before = (worker.address, worker.role, worker.labels, worker.excluded_by)
        worker.address, worker.role, worker.labels = address, role, dict(labels)
        worker.is_critical, worker.is_marked_draining = is_critical, is_draining
        if before != (worker.address, worker.role, worker.labels, worker.excluded_by):
            self.version += 1
        return worker

    def unregistered(self, worker_id: str) -> None:
        """The registry lists the worker no more. Idempotent."""
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            self.health.left(worker_id)
            if worker.feed is not None:
                worker.feed.drop()
            for target in worker.targets:
                target.leave()
            self.version += 1

    def described(self, worker: Worker, description: WorkerDescription) -> None:
        """The worker says what it is. A new epoch starts with empty blocks and nothing in flight."""
        known = worker.description
        worker.description = description
        worker.role = description.role
        worker.block_size_tokens = description.block_size_tokens
        worker.is_draining_itself = description.is_draining
        ranks = max(1, description.capabilities.data_parallel_size)
        if known is None or known.worker.epoch != description.worker.epoch or len(worker.targets) != ranks:
            self._start_anew(worker, description, ranks)
        self.version += 1

    def standing(self, worker: Worker) -> None:
        """Its watches stand: it takes requests."""
        self._set_fault(worker, "")

    def broken(self, worker: Worker, reason: str) -> None:
        """A watch of it broke: it takes no requests from this moment."""
        self._set_fault(worker, reason)

    def loaded(self, worker: Worker, record: LoadRecord, *, now: float | None = None) -> None:
        """A newer load record. Records of another epoch or of unknown ranks are ignored. `now` None: it does not get older."""
        description = worker.description
        if (
            description is None
            or record.epoch != description.worker.epoch
            or record.data_parallel_rank >= len(worker.targets)
        ):
            return
        worker.targets[record.data_parallel_rank].told(record, now)
        if record.is_draining != worker.is_draining_itself:
            worker.is_draining_itself = record.is_draining
            self.version += 1

    def incompatible(self, worker: Worker) -> bool:
        """True for a prefill worker that no decode worker of its model can take KV from."""
        return worker.role is Role.PREFILL and not any(
            other.role is Role.DECODE
            and other.pairs_as == worker.pairs_as
            and other.description is not None
            and worker.description is not None
            and other.description.model.name == worker.description.model.name
            for other in self.workers.values()
        )

    def _pools_changed(self) -> None:
        self.version += 1

    def _set_fault(self, worker: Worker, fault: str) -> None:
        if worker.stream_fault != fault:
            worker.stream_fault = fault
            self.version += 1

    def _start_anew(self, worker: Worker, description: WorkerDescription, ranks: int) -> None:
        if worker.feed is not None:
            worker.feed.drop()
        worker.feed = KvFeed(
            self.index,
            ranks=ranks,
            tells_events="kv_events" in description.capabilities.features,
            remembered_blocks_max=description.kv_blocks_total,
        )
        ref = description.worker
        for target in worker.targets:
            target.leave()
        worker.targets = [
            Target(
                worker=worker,
                rank=rank,
                block_size_tokens=description.block_size_tokens,
                bits=worker.feed.bits,
                board=self.board,
                cost=self._cost,
                limits=self._target_limits,
                coefficients=Coefficients(description.profile, self._cost),
                ref=WorkerRef(
                    worker_id=ref.worker_id,
                    address=worker.address,
                    epoch=ref.epoch,
                    data_parallel_rank=rank if ranks > 1 else ref.data_parallel_rank,
                ),
            )
            for rank in range(ranks)
        ]
        self.health.began(worker)
