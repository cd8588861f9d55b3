"""The connector of a mesh whose processes somebody else starts and stops."""

from collections.abc import Sequence

from kvmesh.core import Role
from kvmesh.core.planning import PlacementBounds, PoolState, PoolTarget
from services.planner.connectors.mesh_actions import MeshActions


class MeshConnector:
    """Implements Connector. Flips and bounds go to workers and routers; sizes are only published, for others to read from WatchPlans."""

    name = "mesh"
    can_flip = True

    def __init__(self, actions: MeshActions) -> None:
        self.actions = actions

    async def pools(self, *, timeout_s: float) -> Sequence[PoolState]:
        return ()

    async def scale(self, target: PoolTarget, *, fencing_token: int, timeout_s: float) -> PoolState:
        return PoolState(model=target.model, role=target.role, workers_wanted=target.workers, workers_running=0)

    async def flip(self, worker_id: str, role: Role, *, fencing_token: int, timeout_s: float) -> None:
        await self.actions.flip(worker_id, role, fencing_token=fencing_token, timeout_s=timeout_s)

    async def set_bounds(self, model: str, bounds: PlacementBounds, *, fencing_token: int, timeout_s: float) -> None:
        await self.actions.set_bounds(model, bounds, fencing_token=fencing_token, timeout_s=timeout_s)

    async def idle_first(self, model: str, role: Role, *, timeout_s: float) -> Sequence[str]:
        return await self.actions.idle_first(model, role, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Nothing to release: the channels belong to the process."""
