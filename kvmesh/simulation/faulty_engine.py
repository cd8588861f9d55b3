"""A simulated engine with faults that a test injects."""

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from kvmesh.engines.base import EngineRequest
from kvmesh.engines.simulated.engine import SimulatedEngine
from kvmesh.engines.simulated.step import Step
from kvmesh.errors import LostError, OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The engine makes no step for `duration_s` of its clock."""

    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Each step takes this many times as long; 1 ends the fault."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The engine refuses this fraction of submissions as overloaded; 0 ends the fault."""

    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseKv:
    """The engine immediately frees and overwrites the blocks of its next `handles` handles."""

    handles: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Die:
    """The engine dies: `steps` raises LostError, and peers can no longer read its KV memory."""

    message: str = "the simulated engine died"


Fault = Stall | Slow | Refuse | LoseKv | Die


class FaultyEngine(SimulatedEngine):
    """`fault_seed` decides which submissions `Refuse` refuses."""

    def __init__(self, *arguments: Any, fault_seed: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._fault_random = Random(fault_seed)
        self._refused_fraction = 0.0
        self._handles_to_lose = 0
        self._stall_s = 0.0
        self._slowness = 1.0

    def inject(self, fault: Fault) -> None:
        match fault:
            case Stall():
                self._stall_s += fault.duration_s
            case Slow():
                self._slowness = fault.factor
            case Refuse():
                self._refused_fraction = fault.fraction
            case LoseKv():
                self._handles_to_lose += fault.handles
            case Die():
                self._fail(LostError(fault.message, reason="engine_died"))
                if self._transport is not None:
                    self._tasks.append(asyncio.create_task(self._transport.aclose(), name="kv-transport-death"))
                if self._exchange is not None:
                    self._tasks.append(asyncio.create_task(self._exchange.aclose(), name="rendezvous-death"))
        self._wake()

    def submit_nowait(self, request: EngineRequest) -> None:
        self._check_running()
        if self._refused_fraction and self._fault_random.random() < self._refused_fraction:
            raise OverloadedError("refused by an injected fault", reason="fault", retry_after_s=0.1)
        super().submit_nowait(request)

    async def _step_once(self) -> None:
        if self._stall_s > 0:
            stall_s, self._stall_s = self._stall_s, 0.0
            await self._clock.sleep(stall_s)
        else:
            began_s = self._clock.now()
            await super()._step_once()
            if self._slowness > 1 and (step_s := self._clock.now() - began_s) > 0:
                await self._clock.sleep((self._slowness - 1) * step_s)

    def _settle(self, step: Step | None = None) -> None:
        for finish in step.finishes if step is not None else ():
            if finish.handle is not None and self._handles_to_lose:
                # Before the finish is delivered, so that no pull is faster.
                self._handles_to_lose -= 1
                self._lose(finish.handle.handle_id)
        super()._settle(step)

    def _lose(self, handle_id: str) -> None:
        """Ends the lease, then overwrites all blocks without a holder, as later prompts would."""
        pool = self.scheduler.pool
        self.scheduler.leases.end(handle_id)
        taken = pool.allocate(pool.available)
        self.scheduler.memory.write(taken, [0] * len(taken), np.zeros(len(taken), np.uint64))
        pool.drop(taken)
