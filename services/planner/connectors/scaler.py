"""The connector to a ScalerService, such as the one of `kvmesh up`, which starts and stops processes."""

from collections.abc import Sequence

from kvmesh.core import Role
from kvmesh.core.planning import PlacementBounds, PoolState, PoolTarget
from kvmesh.rpc.scaler_client import GrpcScalerClient
from services.planner.connectors.mesh_actions import MeshActions


class ScalerConnector:
    """Implements Connector. The scaler sizes the pools; flips and bounds go to workers and routers directly."""

    name = "scaler"
    can_flip = True

    def __init__(self, scaler: GrpcScalerClient, actions: MeshActions) -> None:
        self._scaler = scaler
        self.actions = actions

    async def pools(self, *, timeout_s: float) -> Sequence[PoolState]:
        return await self._scaler.list_pools(timeout_s=timeout_s)

    async def scale(self, target: PoolTarget, *, fencing_token: int, timeout_s: float) -> PoolState:
        workers = await self._scaler.scale(target, fencing_token=fencing_token, timeout_s=timeout_s)
        return PoolState(model=target.model, role=target.role, workers_wanted=workers, workers_running=workers)

    async def flip(self, worker_id: str, role: Role, *, fencing_token: int, timeout_s: float) -> None:
        await self.actions.flip(worker_id, role, fencing_token=fencing_token, timeout_s=timeout_s)

    async def set_bounds(self, model: str, bounds: PlacementBounds, *, fencing_token: int, timeout_s: float) -> None:
        await self.actions.set_bounds(model, bounds, fencing_token=fencing_token, timeout_s=timeout_s)

    async def idle_first(self, model: str, role: Role, *, timeout_s: float) -> Sequence[str]:
        return await self.actions.idle_first(model, role, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Nothing to release: the channels belong to the process."""
