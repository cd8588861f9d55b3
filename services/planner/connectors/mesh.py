"""Connectors that move workers between pools and set the routers' bounds: without starting or stopping a process, or with a ScalerService."""

import asyncio
from collections.abc import Sequence

from kvmesh.core import Role
from kvmesh.core.planning import PlacementBounds, PoolState, PoolTarget
from kvmesh.discovery.base import DECODE, PREFILL, ROUTER, Instance, Registry
from kvmesh.errors import DeadlineError, MeshError, NotFoundError, UnavailableError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.rpc.scaler_client import GrpcScalerClient
from kvmesh.rpc.worker_client import GrpcWorkerClient

ROUTERS_MAX = 64


class MeshActions:
    """The part of a Connector that calls the workers and routers which the registry lists. Holds no state."""

    def __init__(self, registry: Registry, channels: ChannelPool) -> None:
        self._registry = registry
        self._channels = channels
        self._workers = GrpcWorkerClient(channels)

    async def flip(self, worker_id: str, role: Role, *, fencing_token: int, timeout_s: float) -> None:
        """See Connector."""
        worker = await self._worker(worker_id)
        try:
            await self._workers.set_role(worker.address, role, fencing_token=fencing_token, timeout_s=timeout_s)
        except DeadlineError:
            # The worker may wait for its requests in flight. The change is accepted once the registry shows it.
            if (await self._worker(worker_id)).next_role != role.value:
                raise

    async def set_bounds(self, model: str, bounds: PlacementBounds, *, fencing_token: int, timeout_s: float) -> None:
        """See Connector. Tries all routers, and then raises the first failure."""
        routers = await self._routers()

        async def set_one(router: Instance) -> None:
            client = GrpcRouterClient(self._channels, router.address)
            await client.set_bounds(model, bounds, fencing_token=fencing_token, timeout_s=timeout_s)

        for result in await asyncio.gather(*map(set_one, routers), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def idle_first(self, model: str, role: Role, *, timeout_s: float) -> Sequence[str]:
        """Returns the workers of a pool that routers use, those with the fewest requests first."""
        failure: MeshError = UnavailableError("no router is registered", reason="no_router")
        for router in await self._routers():
            try:
                views = await GrpcRouterClient(self._channels, router.address).list_workers(
                    model=model, timeout_s=timeout_s
                )
            except MeshError as error:
                failure = error
                continue
            pool = [view for view in views if view.role is role and not view.excluded_by]
            pool.sort(key=lambda view: (view.requests_in_flight, view.worker.worker_id))
            # There is a view for each rank. A worker counts once, by its rank with the fewest requests.
            return list(dict.fromkeys(view.worker.worker_id for view in pool))
        raise failure

    async def _worker(self, worker_id: str) -> Instance:
        for service in (PREFILL, DECODE):
            for instance in (await self._registry.instances(service)).instances:
                if instance.instance_id == worker_id:
                    return instance
        raise NotFoundError(f"no worker {worker_id} is registered", reason="worker_not_found", field="worker_id")

    async def _routers(self) -> Sequence[Instance]:
        view = await self._registry.instances(ROUTER)
        return [each for each in view.instances if each.takes_requests][:ROUTERS_MAX]


class MeshConnector(MeshActions):
    """Implements Connector for a mesh whose processes are started and stopped outside of kvmesh.

    It only publishes sizes, which clients read from WatchPlans.
    """

    name = "mesh"
    can_flip = True

    async def pools(self, *, timeout_s: float) -> Sequence[PoolState]:
        return ()

    async def scale(self, target: PoolTarget, *, fencing_token: int, timeout_s: float) -> PoolState:
        return PoolState(model=target.model, role=target.role, workers_wanted=target.workers, workers_running=0)

    async def aclose(self) -> None:
        """Nothing to release: the channels belong to the process."""


class ScalerConnector(MeshConnector):
    """Has a ScalerService size the pools, such as the one of `kvmesh up`, which starts and stops processes."""

    name = "scaler"

    def __init__(self, scaler: GrpcScalerClient, registry: Registry, channels: ChannelPool) -> None:
        super().__init__(registry, channels)
        self._scaler = scaler

    async def pools(self, *, timeout_s: float) -> Sequence[PoolState]:
        return await self._scaler.list_pools(timeout_s=timeout_s)

    async def scale(self, target: PoolTarget, *, fencing_token: int, timeout_s: float) -> PoolState:
        workers = await self._scaler.scale(target, fencing_token=fencing_token, timeout_s=timeout_s)
        return PoolState(model=target.model, role=target.role, workers_wanted=workers, workers_running=workers)
