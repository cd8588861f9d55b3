"""Calls WorkerService over pooled channels. Failures arrive as MeshError, never as RpcError."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from grpc.aio import EOF, AioRpcError

from kvmesh.api.worker.v1 import worker_pb2 as pb
from kvmesh.api.worker.v1.worker_pb2_grpc import WorkerServiceStub
from kvmesh.core import KvBatch, KvPath, KvPathCheck, LoadRecord, Role, WorkerDescription, WorkerRef
from kvmesh.errors import LostError
from kvmesh.model_files import FileAssembler
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.codec.scalars import known_enum, to_duration
from kvmesh.rpc.codec.types import fill_worker_ref
from kvmesh.rpc.codec.worker import (
    KV_PATH_CHECK_CODEC,
    KV_PATH_CODEC,
    ROLE_NUMBERS,
    ROLES,
    from_description,
    from_kv_batch,
    from_load,
)
from kvmesh.rpc.status import from_rpc_error


class GrpcWorkerClient:
    """One client for all workers; calls name the address, since a worker's description is not known before the first."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def describe(self, address: str, *, timeout_s: float) -> WorkerDescription:
        try:
            response = await self._stub(address).Describe(pb.DescribeRequest(), timeout=timeout_s, wait_for_ready=False)
        except AioRpcError as error:
            raise from_rpc_error(error, where=address) from error
        return from_description(response)

    async def watch_kv(
        self, address: str, *, resume_at: tuple[int, int] | None = None
    ) -> AsyncGenerator[KvBatch, None]:
        """The KV cache: a snapshot, or what followed `resume_at` (epoch, sequence), then every change.

        Never ends on its own: LostError if the worker ends the stream. Closing the generator ends the call.
        """
        request = pb.WatchKvRequest()
        if resume_at is not None:
            request.resume_epoch, request.resume_sequence = resume_at
        async with aclosing(_responses(self._stub(address).WatchKv(request), address)) as messages:
            async for message in messages:
                yield from_kv_batch(message)

    async def watch_load(self, address: str, *, interval_s: float) -> AsyncGenerator[LoadRecord, None]:
        """The load: the newest record immediately, then one per `interval_s` in which something changed.

        A worker repeats its record if nothing has changed for a second, so a longer silence means that it hangs. Ends as `watch_kv` does.
        """
        request = pb.WatchLoadRequest(interval=to_duration(interval_s))
        async with aclosing(_responses(self._stub(address).WatchLoad(request), address)) as messages:
            async for message in messages:
                yield from_load(message.load)

    async def fetch_model_files(self, address: str, digest: str, *, timeout_s: float) -> Mapping[str, bytes]:
        """Returns the files by name, checked as FileAssembler describes. NotFoundError if the worker serves others."""
        files = FileAssembler(digest)
        call = self._stub(address).FetchModelFiles(pb.FetchModelFilesRequest(digest=digest), timeout=timeout_s)
        try:
            while (message := await call.read()) is not EOF:
                files.add(message.path, message.data, is_last=message.is_last)
        except AioRpcError as error:
            raise from_rpc_error(error, where=address) from error
        finally:
            call.cancel()
        return files.contents()

    async def check_kv_path(self, address: str, source: WorkerRef, *, timeout_s: float) -> KvPathCheck:
        """Has the worker pull a short prompt's KV from a prefill worker. UnsupportedError: it pulls no KV."""
        request = pb.CheckKvPathRequest()
        fill_worker_ref(request.source, source)
        try:
            response = await self._stub(address).CheckKvPath(request, timeout=timeout_s, wait_for_ready=False)
        except AioRpcError as error:
            raise from_rpc_error(error, where=address) from error
        return KV_PATH_CHECK_CODEC.decode(response)

    async def drain(
        self, address: str, *, drain_timeout_s: float, timeout_s: float, undo: bool = False, exits: bool = False
    ) -> int:
        """Has the worker reject new requests and wait for those in flight, or accept requests again. Returns the number still in flight.

        `exits`: then its process ends.
        """
        request = pb.DrainRequest(timeout=to_duration(drain_timeout_s), undo=undo, exits=exits)
        try:
            response = await self._stub(address).Drain(request, timeout=timeout_s, wait_for_ready=False)
        except AioRpcError as error:
            raise from_rpc_error(error, where=address) from error
        return int(response.requests_in_flight)

    async def set_role(self, address: str, role: Role, *, timeout_s: float, fencing_token: int = 0) -> Role:
        """Moves the worker to a pool. UnsupportedError if its engine cannot serve it, or if the planner with this token does not lead."""
        request = pb.SetRoleRequest(role=ROLE_NUMBERS[role], fencing_token=fencing_token)
        try:
            response = await self._stub(address).SetRole(request, timeout=timeout_s, wait_for_ready=False)
        except AioRpcError as error:
            raise from_rpc_error(error, where=address) from error
        return known_enum(response.role, ROLES, "role")

    async def list_kv_paths(self, address: str, *, timeout_s: float) -> Sequence[KvPath]:
        """Returns the prefill workers from which the worker has pulled KV or tried to, newest first."""
        request = pb.ListKvPathsRequest()
        try:
            response = await self._stub(address).ListKvPaths(request, timeout=timeout_s, wait_for_ready=False)
        except AioRpcError as error:
            raise from_rpc_error(error, where=address) from error
        return [KV_PATH_CODEC.decode(path) for path in response.paths]

    def _stub(self, address: str) -> Any:
        return WorkerServiceStub(self._channels.channel(address))


async def _responses(call: Any, address: str) -> AsyncGenerator[Any, None]:
    try:
        while (message := await call.read()) is not EOF:
            yield message
        raise LostError("the worker ended the stream", reason="stream_ended", where=address)
    except AioRpcError as error:
        raise from_rpc_error(error, where=address, has_begun=True) from error
    finally:
        call.cancel()
