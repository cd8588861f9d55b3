"""A connector that does nothing: others read the wanted sizes from `GetPlan` or `WatchPlans`."""

from collections.abc import Sequence

from kvmesh.core import Role
from kvmesh.core.planning import PlacementBounds, PoolState, PoolTarget


class NoConnector:
    """Accepts every change and makes none. It manages no pools, so that sizes come from the registry alone."""

    name = "none"
    can_flip = True

    async def pools(self, *, timeout_s: float) -> Sequence[PoolState]:
        return ()

    async def scale(self, target: PoolTarget, *, fencing_token: int, timeout_s: float) -> PoolState:
        return PoolState(model=target.model, role=target.role, workers_wanted=target.workers, workers_running=0)

    async def flip(self, worker_id: str, role: Role, *, fencing_token: int, timeout_s: float) -> None:
        """Does nothing."""

    async def set_bounds(self, model: str, bounds: PlacementBounds, *, fencing_token: int, timeout_s: float) -> None:
        """Does nothing."""

    async def idle_first(self, model: str, role: Role, *, timeout_s: float) -> Sequence[str]:
        return ()

    async def aclose(self) -> None:
        """Does nothing."""
