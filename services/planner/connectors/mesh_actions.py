"""What a planner does to a mesh without starting or stopping a process: it moves workers between pools and sets the routers' bounds."""

import asyncio
from collections.abc import Sequence

from kvmesh.core import Role
from kvmesh.core.planning import PlacementBounds
from kvmesh.discovery.base import DECODE, PREFILL, ROUTER, Instance, Registry
from kvmesh.errors import DeadlineError, MeshError, NotFoundError, UnavailableError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.rpc.worker_client import GrpcWorkerClient

ROUTERS_MAX = 64


class MeshActions:
    """Calls the workers and routers that the registry lists. Holds no state."""

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
        """Workers of a pool that routers use, those with the fewest requests first."""
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
