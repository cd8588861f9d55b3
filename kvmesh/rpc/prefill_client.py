"""Calls PrefillService over pooled channels: on one standing stream per worker, or a call for each prompt without it."""

import asyncio
from dataclasses import replace
from typing import Any

from grpc import StatusCode
from grpc.aio import AioRpcError
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvmesh.api.prefill.v1 import prefill_pb2 as pb
from kvmesh.api.prefill.v1.prefill_pb2_grpc import PrefillServiceStub
from kvmesh.clock import stood_still
from kvmesh.core import Generation, Rendezvous, WorkerRef
from kvmesh.errors import LostError
from kvmesh.rpc.channels import Channels
from kvmesh.rpc.clients import PrefillResult
from kvmesh.rpc.codec.legs import fill_prefill_request, from_prefill_response
from kvmesh.rpc.paced import DEFAULT_PACE_S
from kvmesh.rpc.prefill_link import NoAttachError, PrefillLink
from kvmesh.rpc.status import from_rpc_error

PROBES_MAX = 3
"""Probes in a row while this process stands still again and again."""
PLAIN_WORKERS_MAX = 1024
"""Workers without Attach that are remembered."""


class GrpcPrefillClient:
    """Implements `kvmesh.rpc.clients.PrefillClient`.

    While prompts are computed their worker is asked now and then whether it still answers: how long a prompt may take nobody
    can say in advance, and a hung process keeps its connections.
    """

    def __init__(
        self,
        channels: Channels,
        *,
        frontend_id: str = "frontend",
        probe_interval_s: float = 3.0,
        probe_timeout_s: float = 2.0,
        pace_s: float = DEFAULT_PACE_S,
    ) -> None:
        self._channels = channels
        self._frontend_id = frontend_id
        self._pace_s = pace_s
        self._links: dict[WorkerRef, PrefillLink] = {}
        self._plain: dict[WorkerRef, None] = {}
        self.probe_interval_s = probe_interval_s
        self._probe_timeout_s = probe_timeout_s

    def _stub(self, worker: WorkerRef) -> Any:
        return PrefillServiceStub(self._channels.channel(worker.address))

    def may_answer(self, worker: WorkerRef) -> bool:
        """What the worker's Welcome said; see the protocol. Workers without Attach are older than single tokens."""
        key = _key(worker)
        link = self._links.get(key)
        return key not in self._plain and (link is None or link.may_answer)

    async def prefill(
        self,
        worker: WorkerRef,
        *,
        request_id: str,
        generation: Generation,
        timeout_s: float,
        rendezvous: Rendezvous | None = None,
        reservation_id: str = "",
        wants_output: bool = False,
    ) -> PrefillResult:
        """Computes a prompt; see the protocol."""

        def fill(request: pb.PrefillRequest, packs_tokens: bool) -> None:
            fill_prefill_request(
                request,
                request_id,
                generation,
                rendezvous,
                reservation_id,
                wants_output=wants_output,
                packs_tokens=packs_tokens,
            )

        key = _key(worker)
        if key not in self._plain:
            try:
                return from_prefill_response(await self._link(key).prefill(fill, timeout_s))
            except NoAttachError:
                self._remember_plain(key)
        request = pb.PrefillRequest()
        fill(request, False)
        return await self._prefill_alone(worker, request, timeout_s)

    def _link(self, worker: WorkerRef) -> PrefillLink:
        """The worker's stream; it is opened when there is none."""
        link = self._links.get(worker)
        if link is None:
            link = self._links[worker] = PrefillLink(
                worker,
                self._stub(worker).Attach(),
                frontend_id=self._frontend_id,
                is_alive=lambda: self.is_alive(worker),
                probe_interval_s=self.probe_interval_s,
                on_end=self._forget,
                pace_s=self._pace_s,
            )
        return link

    def _forget(self, link: PrefillLink) -> None:
        if self._links.get(link.worker) is link:
            del self._links[link.worker]

    def _remember_plain(self, worker: WorkerRef) -> None:
        if len(self._plain) >= PLAIN_WORKERS_MAX:
            del self._plain[next(iter(self._plain))]
        self._plain[worker] = None

    async def aclose(self) -> None:
        """Ends all streams; prompts on them fail as lost."""
        for link in list(self._links.values()):
            await link.aclose()

    async def _prefill_alone(self, worker: WorkerRef, request: pb.PrefillRequest, timeout_s: float) -> PrefillResult:
        call = self._stub(worker).Prefill(request, timeout=timeout_s)
        probing = _Probing(self, worker, call)
        try:
            return from_prefill_response(await call)
        except AioRpcError as error:
            # A server that stops cancels what is left: lost work, not a caller's cancel. A refused connection did nothing.
            has_begun = error.code() is not StatusCode.UNAVAILABLE
            raise from_rpc_error(error, where=worker.worker_id, has_begun=has_begun) from error
        except asyncio.CancelledError:
            if not probing.has_failed:
                raise
            raise LostError(
                "the prefill worker has gone silent", reason="worker_silent", where=worker.worker_id
            ) from None
        finally:
            probing.end()

    async def is_alive(self, worker: WorkerRef) -> bool:
        """Whether the worker's event loop answers a health check in time, whatever it says of itself."""
        loop = asyncio.get_running_loop()
        stub: Any = HealthStub(self._channels.channel(worker.address))
        for _ in range(PROBES_MAX):
            due_s = loop.time() + self._probe_timeout_s
            try:
                await stub.Check(HealthCheckRequest(), timeout=self._probe_timeout_s)
            except AioRpcError:
                if not stood_still(due_s, loop.time()):
                    return False
            else:
                return True
        return False

    async def release_kv(self, worker: WorkerRef, handle_id: str, *, timeout_s: float) -> None:
        """Gives a handle back; see the protocol."""
        try:
            await self._stub(worker).ReleaseKv(pb.ReleaseKvRequest(handle_id=handle_id), timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=worker.worker_id) from error


def _key(worker: WorkerRef) -> WorkerRef:
    """One stream serves all ranks of a worker."""
    return worker if not worker.data_parallel_rank else replace(worker, data_parallel_rank=0)


class _Probing:
    """Looks now and then whether the worker of a long call still answers, and cancels the call when it does not.

    A hung process keeps its connections, and how long a prompt may take nobody can say in advance; that its worker answers
    a health check meanwhile can be asked. A call that ends before the first interval costs one timer.
    """

    def __init__(self, client: GrpcPrefillClient, worker: WorkerRef, call: Any) -> None:
        self._client = client
        self._worker = worker
        self._call = call
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(client.probe_interval_s, self._begin)
        self.has_failed = False

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._probe(), name=f"probe-{self._worker.worker_id}")

    async def _probe(self) -> None:
        while True:
            if not await self._client.is_alive(self._worker):
                break
            await asyncio.sleep(self._client.probe_interval_s)
        self.has_failed = True
        self._call.cancel()

    def end(self) -> None:
        """The call is over. Idempotent."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
