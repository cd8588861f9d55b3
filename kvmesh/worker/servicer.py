"""WorkerService: what prefill and decode workers share on the wire. Protobuf to worker and back, no decisions."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from grpc.aio import ServicerContext

from kvmesh.api.worker.v1 import worker_pb2 as pb
from kvmesh.api.worker.v1 import worker_pb2_grpc
from kvmesh.clock import Clock
from kvmesh.core.planning import Fence
from kvmesh.errors import InvalidRequestError, UnavailableError, UnsupportedError
from kvmesh.rpc.codec.scalars import known_enum, optional_duration, optional_field, required_text
from kvmesh.rpc.codec.types import from_worker_ref
from kvmesh.rpc.codec.worker import (
    KV_PATH_CHECK_CODEC,
    KV_PATH_CODEC,
    ROLE_NUMBERS,
    ROLES,
    to_description,
    to_kv_batch,
    to_load,
)
from kvmesh.worker.kv_checks import KvChecks
from kvmesh.worker.load_filter import LoadFilter
from kvmesh.worker.membership import WorkerMembership
from kvmesh.worker.worker import Worker

INTERVAL_MIN_S = 0.01
INTERVAL_MAX_S = 60.0
INTERVAL_DEFAULT_S = 0.1
LATE_RATIO = 1.25
"""Part of the interval that a watcher waits for a step, because the worker is awake then anyway."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one worker, whatever its role. Drain and role changes go through `membership`, which updates the registry.

    `checks` None: the worker does not check KV paths. `exit_process` begins an orderly end of the process; None: Drain cannot end it.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        membership: WorkerMembership,
        clock: Clock,
        checks: KvChecks | None = None,
        exit_process: Callable[[], None] | None = None,
    ) -> None:
        self._exit_process = exit_process
        self._worker = worker
        self._checks = checks
        self._membership = membership
        self._files = membership.files
        self._clock = clock
        self._fence = Fence()

    async def Describe(self, request: pb.DescribeRequest, context: ServicerContext[Any, Any]) -> pb.DescribeResponse:
        """Returns the worker's identity, capabilities and model."""
        return to_description(self._membership.describe())

    async def WatchKv(
        self, request: pb.WatchKvRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchKvResponse]:
        """A snapshot or what was missed, then every change."""
        epoch = optional_field(request, "resume_epoch")
        sequence = optional_field(request, "resume_sequence")
        async with aclosing(self._worker.kv_feed.watch(epoch=epoch, sequence=sequence)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                yield to_kv_batch(batch)

    async def WatchLoad(
        self, request: pb.WatchLoadRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchLoadResponse]:
        """Sends the newest record, then one per interval in which requests or memory changed, one per PROGRESS_INTERVAL_S in
        which only steps were made, and at least one per `load_interval_s`."""
        asked_s = optional_duration(request, "interval")
        interval_s = INTERVAL_DEFAULT_S if asked_s is None else asked_s
        if not INTERVAL_MIN_S <= interval_s <= INTERVAL_MAX_S:
            raise InvalidRequestError("interval must be 10 ms to 60 s", field="interval")
        settings = self._worker.settings
        filters = defaultdict[int, LoadFilter](lambda: LoadFilter(interval_s=settings.load_interval_s))
        pause_s, signal = min(interval_s, settings.load_interval_s), self._worker.load_signal
        # One pause follows the last record, another one follows the quiet wait: together they end after `load_interval_s` at the latest.
        quiet_s = max(0.0, settings.load_interval_s - 2 * LATE_RATIO * pause_s)
        while not self._worker.ended.is_set():
            records = self._worker.engine.rank_loads()
            is_sent = False
            for record in records if self._worker.engine.is_responsive else ():
                rank = filters[record.data_parallel_rank]
                if rank.passes(record, self._clock.now(), is_draining=self._worker.is_draining):
                    yield pb.WatchLoadResponse(load=to_load(self._worker.load_record(record)))
                    is_sent = True
            is_busy = self._worker.legs or any(
                each.running_requests or each.waiting_requests or each.kv_blocks_used for each in records
            )
            if not is_sent and not is_busy:
                # The worker is idle. The next leg notifies the signal, so nothing is missed by waiting longer.
                # Only after a record that was not sent: the loop may have started a leg while a record was being written.
                # Blocks in use are freed without a notification: by leases, and by pulls that outlive their requests.
                await signal.wait(at_least_s=0, at_most_s=quiet_s)
            if not self._worker.ended.is_set():
                await signal.wait(at_least_s=pause_s, at_most_s=LATE_RATIO * pause_s)
        raise UnavailableError(
            "the worker is stopping", reason="worker_stopping", where=self._worker.identity.worker_id
        )

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: ServicerContext[Any, Any]
    ) -> pb.LoadAdapterResponse:
        """Makes an adapter usable."""
        name = required_text(request.name, field="name", characters_max=256)
        source = required_text(request.source, field="source", characters_max=4096)
        await self._worker.engine.load_adapter(name, source=source)
        await self._membership.publish()
        return pb.LoadAdapterResponse(adapters=self._worker.description.model.adapters)

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: ServicerContext[Any, Any]
    ) -> pb.UnloadAdapterResponse:
        """Forgets an adapter."""
        await self._worker.engine.unload_adapter(required_text(request.name, field="name", characters_max=256))
        await self._membership.publish()
        return pb.UnloadAdapterResponse(adapters=self._worker.description.model.adapters)

    async def Drain(self, request: pb.DrainRequest, context: ServicerContext[Any, Any]) -> pb.DrainResponse:
        """Refuses new requests and waits for those in flight, or takes requests again."""
        timeout_s = optional_duration(request, "timeout")
        if timeout_s is not None and not 0 <= timeout_s <= 3600:
            raise InvalidRequestError("timeout must be 0 s to 1 h", field="timeout")
        if request.exits and (request.undo or self._exit_process is None):
            raise UnsupportedError("this worker cannot end its process on request", field="exits")
        if request.undo:
            await self._membership.set_draining(False)
            return pb.DrainResponse(requests_in_flight=self._worker.statistics().legs)
        await self._membership.set_draining(True)
        left = await self._worker.drain(timeout_s)
        if request.exits and self._exit_process is not None:
            self._exit_process()
        return pb.DrainResponse(requests_in_flight=left)

    async def SetRole(self, request: pb.SetRoleRequest, context: ServicerContext[Any, Any]) -> pb.SetRoleResponse:
        """Moves the worker to the other pool, if the engine can serve it."""
        role = known_enum(request.role, ROLES, "role")
        self._fence.check(request.fencing_token)
        role = await self._membership.set_role(role)
        return pb.SetRoleResponse(role=ROLE_NUMBERS[role])

    async def ResetCache(
        self, request: pb.ResetCacheRequest, context: ServicerContext[Any, Any]
    ) -> pb.ResetCacheResponse:
        """Evicts cached blocks without a holder."""
        return pb.ResetCacheResponse(is_reset=await self._worker.engine.reset_cache())

    async def Sleep(self, request: pb.SleepRequest, context: ServicerContext[Any, Any]) -> pb.SleepResponse:
        """Refuses requests and frees what the engine can free."""
        level = request.level if request.HasField("level") else 1
        if level not in (1, 2):
            raise InvalidRequestError("level must be 1 or 2", field="level")
        was_draining = self._worker.is_draining
        await self._membership.set_draining(True)
        try:
            await self._worker.engine.sleep(level)
        except BaseException:
            # An engine that cannot sleep continues to serve.
            await self._membership.set_draining(was_draining)
            raise
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: ServicerContext[Any, Any]) -> pb.WakeResponse:
        """Ends Sleep."""
        await self._worker.engine.wake()
        await self._membership.set_draining(False)
        return pb.WakeResponse()

    async def CheckKvPath(
        self, request: pb.CheckKvPathRequest, context: ServicerContext[Any, Any]
    ) -> pb.CheckKvPathResponse:
        """Pulls a short prompt's KV from a prefill worker."""
        if self._checks is None or not self._checks.can_check:
            raise UnsupportedError("this worker pulls no KV", reason="no_kv_pulls")
        required_text(request.source.worker_id, field="source.worker_id", characters_max=128)
        required_text(request.source.address, field="source.address", characters_max=256)
        source = from_worker_ref(request.source)
        return KV_PATH_CHECK_CODEC.encode(await self._checks.check(source))

    async def ListKvPaths(
        self, request: pb.ListKvPathsRequest, context: ServicerContext[Any, Any]
    ) -> pb.ListKvPathsResponse:
        """Transfers by prefill worker."""
        return pb.ListKvPathsResponse(
            paths=[KV_PATH_CODEC.encode(each) for each in self._worker.engine.kv_paths.paths()]
        )

    async def FetchModelFiles(
        self, request: pb.FetchModelFilesRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.FetchModelFilesResponse]:
        """Sends the files that a frontend needs."""
        async with aclosing(
            self._files.parts(required_text(request.digest, field="digest", characters_max=64))
        ) as parts:  # type: ignore[type-var]
            async for part in parts:
                yield pb.FetchModelFilesResponse(path=part.name, data=part.data, is_last=part.is_last)
