"""The interface between the planner and whatever starts, stops and changes workers."""

from collections.abc import Sequence
from typing import Protocol

from kvmesh.core import Role
from kvmesh.core.planning import PlacementBounds, PoolState, PoolTarget


class Connector(Protocol):
    """Acts for the planner.

    1. Every call is idempotent: it states what is wanted. The planner repeats a call whose result it does not know.
    2. Every call returns when the change is accepted, not when it is complete. `pools` shows what became ready.
    3. Every call ends within `timeout_s` with a MeshError at the latest. After an error the change may or may not have been made.
    4. `fencing_token` grows with every new leader. A call with an older token than the newest one that was seen is refused with
       UnsupportedError(reason="not_leader") and changes nothing.
    5. Cancelling a call leaves no task behind.
    """

    name: str
    can_flip: bool
    """Whether `flip` may be called. Otherwise the planner decides without flips."""

    async def pools(self, *, timeout_s: float) -> Sequence[PoolState]:
        """Returns the pools that the connector manages."""
        ...

    async def scale(self, target: PoolTarget, *, fencing_token: int, timeout_s: float) -> PoolState:
        """Sets the wanted size of a pool. Shrinking drains workers before it stops them.

        The returned `workers_wanted` is what will be, within the connector's limits.
        """
        ...

    async def flip(self, worker_id: str, role: Role, *, fencing_token: int, timeout_s: float) -> None:
        """Moves a worker to the pool of `role`: it drains or migrates, changes its role and registers again.

        The wanted sizes of both pools change by one. Does nothing if the worker already has the role. UnsupportedError if its engine
        cannot change roles, NotFoundError if there is no such worker.
        """
        ...

    async def set_bounds(self, model: str, bounds: PlacementBounds, *, fencing_token: int, timeout_s: float) -> None:
        """Sets the bounds of a model's placements on all routers.

        The planner repeats the call at each interval, so that routers that start later receive them too.
        """
        ...

    async def idle_first(self, model: str, role: Role, *, timeout_s: float) -> Sequence[str]:
        """Returns the ids of a pool's workers, those with the fewest requests first, because flipping or stopping them does the least harm."""
        ...

    async def aclose(self) -> None:
        """Releases connections. Leaves the workers as they are."""
        ...


class NoConnector:
    """Accepts every change and makes none: others read the wanted sizes from `GetPlan` or `WatchPlans`.

    It manages no pools, so that sizes come from the registry alone.
    """

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
