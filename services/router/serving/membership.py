"""Keeps the fleet up to date: the registry lists the workers, two streams per worker report its cache and its load.

One task per listed worker calls Describe, then WatchKv and WatchLoad concurrently. When either breaks, or the load stream is silent for
too long, the worker gets no requests from then on. The task reconnects with back-off and resumes the KV events where they stopped; the
worker gets requests again after its first load record. A worker that the registry marks as draining or critical is excluded whatever its
streams say. While the registry cannot be reached, and for a while
afterwards, its last view stays (`kvmesh/discovery/members.py`).
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

from kvmesh.checks import is_whole_number
from kvmesh.clock import Clock
from kvmesh.core import LoadRecord, Role
from kvmesh.discovery.base import DECODE, LABEL_PREFIX, PREFILL, ROLE_SEQUENCE_KEY, Health, Instance, Registry, View
from kvmesh.discovery.members import watch_members
from kvmesh.errors import DeadlineError, LostError, MeshError, OverloadedError, UnavailableError
from kvmesh.event_log import event_logger
from kvmesh.lifecycle import run_together
from kvmesh.rpc.worker_client import GrpcWorkerClient
from services.router.serving.silence_timeout import silence_timeout
from services.router.workers.fleet import Fleet
from services.router.workers.worker import RegisteredWorker

_log = event_logger(__name__)

POOLS = {PREFILL: Role.PREFILL, DECODE: Role.DECODE}
SILENCE_S = 3.0
"""A worker without a load record for this time gets no requests. Workers repeat their record every second, so three are missing."""
READING_S = 0.3
"""Time in which records are read that arrived while this process stood still."""
DESCRIBE_TIMEOUT_S = 2.0
DESCRIBE_INTERVAL_S = 5.0
"""Time between two requests for a worker's description; adapters come and go."""
LOAD_INTERVAL_S = 0.1
"""Shortest time between two load records of a worker."""
RECONNECT_S_MIN, RECONNECT_S_MAX = 0.1, 2.0
"""Pause before the router connects to a worker again; doubles with each failure, up to the maximum."""


@dataclass(slots=True, eq=False, kw_only=True)
class _FollowedWorker:
    """A listed worker, and the task that follows it."""

    worker: RegisteredWorker
    service: str
    epoch: str
    role_sequence: int
    task: asyncio.Task[None]

    def is_newer(self, instance: Instance, service: str, role_sequence: int) -> bool:
        """Returns True if the instance is the same process before it changed its role to the present one."""
        # A restarted process counts its changes of role from zero.
        is_same = self.worker.address == instance.address and self.epoch == instance.meta.get("epoch", "")
        return is_same and self.service != service and self.role_sequence > role_sequence


class FleetMembership:
    """A running part with one task per pool and one per worker."""

    def __init__(
        self,
        registry: Registry,
        client: GrpcWorkerClient,
        fleet: Fleet,
        *,
        clock: Clock,
        generator: Random,
    ) -> None:
        self._registry = registry
        self._client = client
        self._fleet = fleet
        self._clock = clock
        self._random = generator
        self._followed: dict[str, _FollowedWorker] = {}
        self._snapshot_lock = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self._running: asyncio.Task[None] | None = None
        self._viewed = {service: asyncio.Event() for service in POOLS}

    async def wait_viewed(self) -> None:
        """Waits until the registry has listed both pools. A router that serves before that would refuse requests."""
        for viewed in self._viewed.values():
            await viewed.wait()

    async def start(self) -> None:
        """Part of the interface; `run` does the work."""

    async def run(self) -> None:
        self._running = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for service, role in POOLS.items():
                tasks.create_task(self._watch(service, role), name=f"membership-{service}")

    async def aclose(self) -> None:
        running, self._running = self._running, None
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait([running])

    async def _watch(self, service: str, role: Role) -> None:
        async with aclosing(watch_members(self._registry, service, self._clock)) as views:
            async for view in views:
                self._on_view(view, role)

    def _on_view(self, view: View, role: Role) -> None:
        if view.is_stale:
            _log.warning("registry_view_stale", consul_service=view.service)
            return
        for instance in view.instances:
            self._on_instance(instance, view.service, role)
        listed = {instance.instance_id for instance in view.instances}
        for worker_id, followed in list(self._followed.items()):
            if followed.service == view.service and worker_id not in listed:
                self._on_gone(worker_id, followed)
        self._viewed[view.service].set()

    def _on_instance(self, instance: Instance, service: str, role: Role) -> None:
        followed = self._followed.get(instance.instance_id)
        role_sequence = role_sequence_of(instance)
        # The views of the pools arrive independently, so this one may be from before the worker changed its role.
        if followed is not None and followed.is_newer(instance, service, role_sequence):
            return
        if followed is not None and (followed.worker.address, followed.service) != (instance.address, service):
            # Another process has the id now, or the worker changed its pool: start again with its new description.
            followed.task.cancel()
            self._fleet.unregister(instance.instance_id)
            followed = None
        worker = self._fleet.register(
            instance.instance_id,
            address=instance.address,
            role=role,
            labels=labels_of(instance),
            is_critical=instance.health is Health.CRITICAL,
            is_draining=instance.is_draining,
        )
        if followed is None and self._tasks is not None:
            task = self._tasks.create_task(self._follow(worker), name=f"follow-{instance.instance_id}")
            self._followed[instance.instance_id] = _FollowedWorker(
                worker=worker,
                service=service,
                epoch=instance.meta.get("epoch", ""),
                role_sequence=role_sequence,
                task=task,
            )
            _log.info("worker_joined", worker_id=instance.instance_id, address=instance.address)

    def _on_gone(self, worker_id: str, followed: _FollowedWorker) -> None:
        followed.task.cancel()
        del self._followed[worker_id]
        self._fleet.unregister(worker_id)
        _log.info("worker_left", worker_id=worker_id)

    async def _follow(self, worker: RegisteredWorker) -> None:
        pause_s = RECONNECT_S_MIN
        logged = ""
        while True:
            was_connected, problem = await self._connect(worker)
            if was_connected:
                self._fleet.disconnected(worker, "silent" if problem.reason == "silent" else "unreachable")
                self._fleet.health.on_disconnected(worker, worker.stream_fault, self._clock.now())
                pause_s = RECONNECT_S_MIN
                _log.warning(
                    "worker_streams_broken", worker_id=worker.worker_id, reason=problem.reason, detail=problem.message
                )
            elif logged != problem.message:
                # Once per cause: the log must show a listed worker that never joins.
                _log.warning(
                    "worker_not_joined", worker_id=worker.worker_id, reason=problem.reason, detail=problem.message
                )
            logged = problem.message
            await self._clock.sleep(pause_s * (0.5 + self._random.random() / 2))
            pause_s = min(2 * pause_s, RECONNECT_S_MAX)

    async def _connect(self, worker: RegisteredWorker) -> tuple[bool, MeshError]:
        """Connects and stays connected until something breaks. Returns whether the worker got requests, and what broke."""
        try:
            await self._describe(worker)
            await run_together(self._watch_kv(worker), self._watch_load(worker), self._keep_description(worker))
        except MeshError as error:
            # Its traceback has this frame, and this frame has the error: a reference cycle for each attempt to reach an unreachable worker.
            return worker.stream_fault == "", error.with_traceback(None)
        raise AssertionError("the streams of a worker end with an error only")

    async def _describe(self, worker: RegisteredWorker) -> None:
        description = await self._client.describe(worker.address, timeout_s=DESCRIBE_TIMEOUT_S)
        if description.worker.worker_id != worker.worker_id:
            message = f"{worker.address} answers as {description.worker.worker_id}, not as {worker.worker_id}"
            raise UnavailableError(message, reason="wrong_worker")
        known = worker.description
        # Only after a change, because `Fleet.describe` causes all pools to be built again.
        if known is None or known != description or not worker.targets:
            self._fleet.describe(worker, description)

    async def _keep_description(self, worker: RegisteredWorker) -> None:
        """Renews the description: adapters and roles change while a worker runs. A short delay is harmless."""
        while True:
            await self._clock.sleep(DESCRIBE_INTERVAL_S)
            try:
                await self._describe(worker)
            except (DeadlineError, UnavailableError) as error:
                # A busy worker may be late. The streams show whether it is alive.
                _log.info("description_not_renewed", worker_id=worker.worker_id, reason=error.reason)

    async def _watch_kv(self, worker: RegisteredWorker) -> None:
        while True:
            feed = worker.feed
            assert feed is not None
            try:
                async with aclosing(self._client.watch_kv(worker.address, resume_at=feed.resume_at)) as batches:
                    async for batch in batches:
                        if batch.is_snapshot:
                            await self._yield_to_loop()
                        # During an await, a new description may have replaced the feed.
                        if worker.feed is not feed or not feed.apply(batch):
                            break
            except OverloadedError:
                # This router fell behind the worker's buffer; the worker is well.
                _log.warning("kv_watch_fell_behind", worker_id=worker.worker_id)
            _log.info("kv_watch_renewed", worker_id=worker.worker_id, reason=feed.reason)
            await self._clock.sleep(RECONNECT_S_MIN)

    async def _yield_to_loop(self) -> None:
        """Lets other work of the event loop run before each part of a snapshot, so that the router continues to place requests."""
        # The lock serialises the parts of all workers. Without it, all of them would wake, and be applied, in the same iteration.
        async with self._snapshot_lock:
            await asyncio.sleep(0)

    async def _watch_load(self, worker: RegisteredWorker) -> None:
        records = self._client.watch_load(worker.address, interval_s=LOAD_INTERVAL_S)
        async with aclosing(records):
            while True:
                try:
                    record = await self._next_record(records)
                except TimeoutError:
                    message = f"no load record for {SILENCE_S:g} s"
                    raise DeadlineError(message, reason="silent", where=worker.worker_id) from None
                if worker.description is None or record.epoch != worker.description.worker.epoch:
                    raise LostError("the worker process was replaced", reason="epoch_changed", where=worker.worker_id)
                # Before `connected`: the first placement on the worker must see its load.
                self._fleet.on_load_record(worker, record, now=self._clock.now())
                self._fleet.connected(worker)
                self._fleet.health.on_load_record(worker, record, self._clock.now())

    async def _next_record(self, records: AsyncGenerator[LoadRecord, None]) -> LoadRecord:
        """Raises TimeoutError when the worker is silent. The router's own pause must not look like silence of all workers."""
        async with silence_timeout(SILENCE_S, reading_s=READING_S):
            return await anext(records)


def role_sequence_of(instance: Instance) -> int:
    """Returns how often the worker has changed its role; 0 if the registry does not say."""
    text = instance.meta.get(ROLE_SEQUENCE_KEY, "")
    return int(text) if is_whole_number(text) else 0


def labels_of(instance: Instance) -> dict[str, str]:
    return {k.removeprefix(LABEL_PREFIX): v for k, v in instance.meta.items() if k.startswith(LABEL_PREFIX)}
