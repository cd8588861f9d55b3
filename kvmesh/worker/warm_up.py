"""Runs a short leg on the worker's own engine before the worker registers, so that no client's request is the engine's first."""

import asyncio

from kvmesh.clock import Clock
from kvmesh.core import KvHandle, Leg, LegTask, Role
from kvmesh.errors import MeshError
from kvmesh.event_log import event_logger
from kvmesh.worker.kv_checks import KvChecks
from kvmesh.worker.own_handoff import OwnHandoff
from kvmesh.worker.short_prompt import short_prompt
from kvmesh.worker.single_leg import stream_leg
from kvmesh.worker.worker import Worker

_log = event_logger(__name__)

WARM_UP_TIMEOUT_S = 60.0
"""Longest warm-up. An engine on a CPU may compile during its first step."""

CLEAR_ATTEMPTS = 20
CLEAR_PAUSE_S = 0.05


class WarmUp:
    """The warm-up as a part of the process, between the worker and its registration. It never fails the start."""

    def __init__(self, *, worker: Worker, checks: KvChecks, own_handoff: OwnHandoff, clock: Clock) -> None:
        self._worker = worker
        self._checks = checks
        self._own_handoff = own_handoff
        self._clock = clock

    async def start(self) -> None:
        started_s = self._clock.now()
        handle: KvHandle | None = None
        is_warm = False
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                handle = await self._run_leg()
                await self._clear_cache()
            is_warm = True
        except TimeoutError:
            _log.warning("warm_up_failed", reason="timed_out", detail=f"no answer within {WARM_UP_TIMEOUT_S:g} s")
        except MeshError as error:
            _log.warning("warm_up_failed", reason=error.reason, detail=error.message)
        await self._checks.check_one()
        if handle is not None:
            await self._own_handoff.check(handle)
        if is_warm:
            _log.info("worker_warmed_up", elapsed_s=round(self._clock.now() - started_s, 3))

    async def _run_leg(self) -> KvHandle | None:
        """Prefill workers make a handle, which is released; decode workers generate two tokens."""
        handle: KvHandle | None = None
        description = self._worker.description
        task = LegTask.PREFILL if description.role is Role.PREFILL else LegTask.GENERATE
        generation = short_prompt(description, "warm-up", tokens=2)
        leg = Leg(leg_id="warm-up", task=task, generation=generation)
        async for step in stream_leg(self._worker, leg, timeout_s=WARM_UP_TIMEOUT_S):
            if step.finish is not None and step.finish.handle is not None:
                self._worker.release_nowait(step.finish.handle.handle_id)
                # Needed only to see where it says that the KV is.
                handle = step.finish.handle
        return handle

    async def _clear_cache(self) -> None:
        """Evicts the prompt's blocks. An engine needs a step to free those of a released handle."""
        for _ in range(CLEAR_ATTEMPTS):
            if await self._worker.engine.reset_cache():
                return
            await self._clock.sleep(CLEAR_PAUSE_S)

    async def aclose(self) -> None:
        """Nothing to close."""
