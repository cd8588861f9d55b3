"""The workers of the mesh: registry entry, description, load, and requests placed on them. Pure; times are arguments.

`Membership` calls it with what the registry and the workers' streams say. `version` increases whenever a worker may enter or leave a
pool.
"""

from collections.abc import Iterable, Mapping

from kvmesh.core import LoadRecord, Role, WorkerDescription, WorkerRef
from services.router.core_settings import CoreSettings
from services.router.health.monitor import HealthMonitor
from services.router.index.kv_feed import KvFeed
from services.router.index.kv_index import KvIndex
from services.router.workers.coefficients import Coefficients
from services.router.workers.target_arrays import TargetArrays
from services.router.workers.worker import RegisteredWorker, Target


class Fleet:
    """All known workers."""

    def __init__(self, index: KvIndex, settings: CoreSettings) -> None:
        self.index = index
        self.arrays = TargetArrays()
        self._settings = settings
        self.workers: dict[str, RegisteredWorker] = {}
        self.version = 0
        self.health = HealthMonitor(settings.breaker, self.workers, self._increase_version)

    def targets(self) -> Iterable[Target]:
        return (target for worker in self.workers.values() for target in worker.targets)

    def register(
        self,
        worker_id: str,
        *,
        address: str,
        role: Role,
        labels: Mapping[str, str],
        is_critical: bool,
        is_draining: bool,
    ) -> RegisteredWorker:
        """Adds or updates a worker as the registry lists it."""
        worker = self.workers.get(worker_id)
        if worker is None:
            worker = self.workers[worker_id] = RegisteredWorker(worker_id=worker_id, address=address, role=role)
        before = (worker.address, worker.role, worker.labels, worker.excluded_by)
        worker.address, worker.role, worker.labels = address, role, dict(labels)
        worker.is_critical, worker.is_marked_draining = is_critical, is_draining
        if before != (worker.address, worker.role, worker.labels, worker.excluded_by):
            self.version += 1
        return worker

    def unregister(self, worker_id: str) -> None:
        """Removes a worker that the registry lists no more. Idempotent."""
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            self.health.remove_worker(worker_id)
            if worker.feed is not None:
                worker.feed.drop()
            for target in worker.targets:
                target.leave()
            self.version += 1

    def describe(self, worker: RegisteredWorker, description: WorkerDescription) -> None:
        """Takes a worker's description. A new epoch starts with an empty cache and nothing in flight.

        Ignores a worker that has left meanwhile: its targets would never leave again.
        """
        if self.workers.get(worker.worker_id) is not worker:
            return
        known = worker.description
        worker.description = description
        worker.role = description.role
        worker.block_size_tokens = description.block_size_tokens
        worker.is_draining_itself = description.is_draining
        ranks = max(1, description.capabilities.data_parallel_size)
        if known is None or known.worker.epoch != description.worker.epoch or len(worker.targets) != ranks:
            self._replace_targets(worker, description, ranks)
        self.version += 1

    def connected(self, worker: RegisteredWorker) -> None:
        """The worker's streams are open: it gets requests."""
        self._set_stream_fault(worker, "")

    def disconnected(self, worker: RegisteredWorker, reason: str) -> None:
        """A stream of the worker broke: it gets no requests from now on."""
        self._set_stream_fault(worker, reason)

    def on_load_record(self, worker: RegisteredWorker, record: LoadRecord, *, now: float | None = None) -> None:
        """Takes a load record. Ignores records of another epoch or of an unknown rank. `now` None: not a later time."""
        description = worker.description
        if (
            description is None
            or record.epoch != description.worker.epoch
            or record.data_parallel_rank >= len(worker.targets)
        ):
            return
        target = worker.targets[record.data_parallel_rank]
        failing_before = target.load.failing_kv_paths if target.load is not None else ()
        target.on_load_record(record, now)
        if tuple(record.failing_kv_paths) != tuple(failing_before):
            self.version += 1
        if record.is_draining != worker.is_draining_itself:
            worker.is_draining_itself = record.is_draining
            self.version += 1

    def failing_kv_pairs(self) -> set[tuple[str, str]]:
        """Returns the pairs of present workers, prefill and decode, between which KV does not pass."""
        return {
            (path.worker_id, worker.worker_id)
            for worker in self.workers.values()
            for target in worker.targets
            if target.load is not None
            for path in target.load.failing_kv_paths
            if path.worker_id in self.workers
        }

    def is_incompatible(self, worker: RegisteredWorker) -> bool:
        """Returns True for a prefill worker from which no decode worker of its model can take KV."""
        return worker.role is Role.PREFILL and not any(
            other.role is Role.DECODE
            and other.exchange_key == worker.exchange_key
            and other.description is not None
            and other.model_name == worker.model_name
            for other in self.workers.values()
        )

    def _increase_version(self) -> None:
        self.version += 1

    def _set_stream_fault(self, worker: RegisteredWorker, fault: str) -> None:
        if worker.stream_fault != fault:
            worker.stream_fault = fault
            self.version += 1

    def _replace_targets(self, worker: RegisteredWorker, description: WorkerDescription, ranks: int) -> None:
        if worker.feed is not None:
            worker.feed.drop()
        worker.feed = KvFeed(
            self.index,
            ranks=ranks,
            sends_events="kv_events" in description.capabilities.features,
            cache_blocks_max=description.kv_blocks_total,
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
                arrays=self.arrays,
                settings=self._settings,
                coefficients=Coefficients(description.profile, itl_target_s=self._settings.cost.itl_target_s),
                ref=WorkerRef(
                    worker_id=ref.worker_id,
                    address=worker.address,
                    epoch=ref.epoch,
                    data_parallel_rank=rank if ranks > 1 else ref.data_parallel_rank,
                ),
            )
            for rank in range(ranks)
        ]
        # After the targets are replaced: it creates one step watch per target.
        self.health.reset_worker(worker)
