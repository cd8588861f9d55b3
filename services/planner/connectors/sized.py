"""The connector to an orchestrator that keeps a number of equal workers per pool."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from kvmesh.core import Role
from kvmesh.core.planning import Fence, PoolState, PoolTarget
from kvmesh.discovery.base import Registry
from kvmesh.errors import DeadlineError, UnsupportedError
from kvmesh.rpc.channels import ChannelPool
from services.planner.connectors.mesh import MeshActions
from services.planner.connectors.pools import ManagedPool, pool_of


class Orchestrator(Protocol):
    """Sets and reads the number of workers of a unit. Every call may be cancelled, and raises MeshError."""

    name: str

    async def resize(self, unit: str, workers: int) -> None:
        """Returns when the size is accepted. Asking again for the same size changes nothing."""
        ...

    async def sizes(self, unit: str) -> tuple[int, int]:
        """Returns how many workers are wanted, and how many run."""
        ...

    async def aclose(self) -> None:
        """Leaves the workers as they are."""
        ...


class SizedConnector(MeshActions):
    """Implements Connector. Workers keep their role here: an orchestrator would start a flipped worker's replacement in the old role.

    The orchestrator chooses which workers end; each drains at its SIGTERM. It does not know fencing tokens, so they are checked in this process.
    """

    can_flip = False

    def __init__(
        self, orchestrator: Orchestrator, pools: Sequence[ManagedPool], *, registry: Registry, channels: ChannelPool
    ) -> None:
        super().__init__(registry, channels)
        self._orchestrator = orchestrator
        self._pools = pools
        self._fence = Fence()
        self.name = orchestrator.name

    async def pools(self, *, timeout_s: float) -> Sequence[PoolState]:
        async with _limit(self.name, timeout_s):
            found = await asyncio.gather(*(self._orchestrator.sizes(pool.unit) for pool in self._pools))
        return [
            PoolState(
                model=pool.model,
                role=pool.role,
                workers_wanted=wanted,
                workers_running=running,
                workers_max=pool.workers_max,
            )
            for pool, (wanted, running) in zip(self._pools, found, strict=True)
        ]

    async def scale(self, target: PoolTarget, *, fencing_token: int, timeout_s: float) -> PoolState:
        pool = pool_of(self._pools, target)
        self._fence.check(fencing_token)
        workers = pool.limited(target.workers)
        async with _limit(self.name, timeout_s):
            await self._orchestrator.resize(pool.unit, workers)
            _, running = await self._orchestrator.sizes(pool.unit)
        return PoolState(model=pool.model, role=pool.role, workers_wanted=workers, workers_running=running)

    async def flip(self, worker_id: str, role: Role, *, fencing_token: int, timeout_s: float) -> None:
        raise UnsupportedError(f"workers of {self.name} keep their role", reason="no_flips")

    async def aclose(self) -> None:
        await self._orchestrator.aclose()


@asynccontextmanager
async def _limit(name: str, timeout_s: float) -> AsyncIterator[None]:
    """Ends what runs inside after a time, with a DeadlineError."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise DeadlineError(f"{name} did not answer in time", reason="timeout") from None
