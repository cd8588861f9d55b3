"""Carries out the faults of a schedule on a mesh."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvmesh.core import Role
from kvmesh.errors import MeshError
from kvmesh.simulation.faulty_engine import Die, LoseKv, Refuse, Slow, Stall
from kvmesh.simulation.virtual_loop import VirtualLoop
from services.simulation.mesh import SimulatedMesh
from services.simulation.schedule import TimedFault
from services.simulation.worker import SimulatedWorker

ENDED_ENGINE_S = 0.2
"""From the death of an engine to the end of its process."""
DRAIN_S = 3.0
"""Longest drain of a worker that is restarted; then its requests are lost."""
SLOW_KV_FACTOR = 50.0
EVERYBODY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """For this time nothing could be sent to a process, or what was on the way was lost. Messages that release KV may be among that."""

    name: str
    began_s: float
    ended_s: float
    is_end: bool = False
    """The process ended."""


class Injector:
    """Invariant: after `run` every process runs, and no fault is active."""

    def __init__(self, mesh: SimulatedMesh) -> None:
        self._mesh = mesh
        self.breaks: list[Break] = []
        self._active = Counter[tuple[object, ...]]()
        self._kinds: dict[str, Callable[[TimedFault], Awaitable[None]]] = {
            "kill": self._kill, "lose-engine": self._lose_engine, "restart": self._restart, "rolling-restart": self._rolling,
            "drain": self._drain, "change-role": self._change_role, "refuse": self._refuse, "stall": self._stall,
            "slow-steps": self._slow_steps, "lose-kv": self._lose_kv, "lose-events": self._lose_events,
            "partition": self._partition, "part-frontend": self._part_frontend, "cut": self._cut, "reset": self._reset,
            "slow-link": self._slow_link, "fail-pulls": self._fail_pulls, "hang-pulls": self._hang_pulls, "slow-kv": self._slow_kv,
            "lose-registry": self._lose_registry, "registry-away": self._registry_away, "registry-empty": self._registry_empty,
            "restart-router": self._restart_router, "restart-frontend": self._restart_frontend,
            "clock-jump": self._clock_jump, "resign": self._resign, "suspend": self._suspend, "pause": self._pause,
        }  # fmt: skip

    async def run(self, faults: tuple[TimedFault, ...]) -> None:
        """Carries out all of them, each at its time from now."""
        began_s = self._mesh.now_s
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                tasks.create_task(self._run_one(fault, began_s + fault.at_s), name=f"fault-{fault.kind}")

    async def _run_one(self, fault: TimedFault, at_s: float) -> None:
        await self._mesh.world.clock.sleep(at_s - self._mesh.now_s)
        self._mesh.world.trace.note(
            "fault", fault.kind, fault.target, fault.other or "-", f"{fault.duration_s:g}", f"{fault.amount:g}"
        )
        await self._kinds[fault.kind](fault)
        self._mesh.world.trace.note("fault-over", fault.kind, fault.target)

    async def _wait(self, duration_s: float) -> None:
        await self._mesh.world.clock.sleep(duration_s)

    async def _wait_to_heal(self, duration_s: float, *fault: object) -> bool:
        """Waits until a fault ends. Returns False if another one of the same name is active then: the last one that ends heals."""
        self._active[fault] += 1
        await self._wait(duration_s)
        self._active[fault] -= 1
        return not self._active[fault]

    def _broke(self, name: str, began_s: float, *, is_end: bool = False) -> None:
        self.breaks.append(Break(name=name, began_s=began_s, ended_s=self._mesh.now_s, is_end=is_end))

    # Processes

    async def _kill(self, fault: TimedFault) -> None:
        name, began_s = fault.target, self._mesh.now_s
        if name in self._mesh.routers:
            await self._kill_router(name, fault.duration_s)
        elif name in self._mesh.frontends:
            if self._mesh.frontends[name].is_alive:
                await self._mesh.kill(name)
                await self._wait(fault.duration_s)
                self._broke(name, began_s)
                await self._mesh.restart_frontend(name)
        elif (worker := self._running(name)) is not None:
            await self._kill_worker(worker, fault.duration_s)

    async def _kill_router(self, name: str, away_s: float) -> None:
        router = self._mesh.routers[name]
        if router.is_alive and not router.is_leaving:
            router.is_leaving = True
            await self._mesh.kill(name)
            await self._wait(away_s)
            await self._mesh.restart_router(name)

    async def _kill_worker(self, worker: SimulatedWorker, away_s: float) -> None:
        began_s, role = self._mesh.now_s, worker.role
        await self._mesh.kill(worker.worker_id)
        self._broke(worker.worker_id, began_s, is_end=True)
        await self._wait(away_s)
        await self._mesh.start_worker(worker.worker_id, role)

    def _running(self, name: str) -> SimulatedWorker | None:
        worker = self._mesh.workers.get(name)
        return worker if worker is not None and worker.is_alive and not worker.is_leaving else None

    def _is_same(self, worker: SimulatedWorker) -> bool:
        """Returns False for a process that has ended in the meantime."""
        return self._running(worker.worker_id) is worker

    async def _lose_engine(self, fault: TimedFault) -> None:
        """The engine dies within a process that lives on for a moment, until its host ends it."""
        worker = self._running(fault.target)
        if worker is None:
            return
        began_s = self._mesh.now_s
        worker.engine.inject(Die())
        await self._wait(ENDED_ENGINE_S)
        if self._is_same(worker):
            await self._kill_worker(worker, fault.duration_s)
        self._broke(fault.target, began_s, is_end=True)

    async def _restart(self, fault: TimedFault) -> None:
        worker = self._running(fault.target)
        if worker is not None:
            await self._replace(worker, fault.duration_s)

    async def _replace(self, worker: SimulatedWorker, drain_s: float) -> None:
        """Drains a worker and starts a new process. A kill meanwhile starts it, too."""
        began_s, role = self._mesh.now_s, worker.role
        worker.is_leaving = True
        await self._mesh.world.run_in(worker.worker_id, worker.leave(drain_s))
        self._broke(worker.worker_id, began_s, is_end=True)
        await self._mesh.start_worker(worker.worker_id, role)

    async def _rolling(self, fault: TimedFault) -> None:
        for name in fault.other.split(","):
            worker = self._running(name)
            if worker is not None:
                await self._replace(worker, DRAIN_S)

    async def _restart_router(self, fault: TimedFault) -> None:
        router = self._mesh.routers[fault.target]
        if router.is_alive and not router.is_leaving:
            router.is_leaving = True
            await self._mesh.world.run_in(fault.target, router.aclose())
            await self._wait(fault.duration_s)
            await self._mesh.restart_router(fault.target)

    async def _restart_frontend(self, fault: TimedFault) -> None:
        """SIGTERM: the frontend finishes its requests, while new requests go to other frontends."""
        frontend = self._mesh.frontends[fault.target]
        if not frontend.takes_requests:
            return
        began_s = self._mesh.now_s
        await self._mesh.world.run_in(fault.target, frontend.pipeline.drain())
        if self._mesh.frontends[fault.target] is frontend and frontend.is_alive:
            frontend.is_alive = False
            await self._mesh.world.run_in(fault.target, frontend.aclose())
            await self._wait(fault.duration_s)
            self._broke(fault.target, began_s)
            await self._mesh.restart_frontend(fault.target)

    async def _drain(self, fault: TimedFault) -> None:
        worker = self._running(fault.target)
        if worker is not None:
            await self._mesh.world.run_in(fault.target, worker.mark_draining())
            await self._wait(fault.duration_s)
            if self._is_same(worker):
                await self._mesh.world.run_in(fault.target, worker.undo_draining())

    async def _change_role(self, fault: TimedFault) -> None:
        worker = self._running(fault.target)
        if worker is None:
            return
        role = worker.worker.description.role
        for wanted in (Role.PREFILL if role is Role.DECODE else Role.DECODE, role):
            if self._is_same(worker):
                await self._mesh.world.run_in(fault.target, worker.membership.set_role(wanted))
            if wanted is not role:
                await self._wait(fault.duration_s)

    async def _pause(self, fault: TimedFault) -> None:
        """SIGSTOP, and SIGCONT later. Nothing of the process runs in between, and what was sent to it waits."""
        name, world = fault.target, self._mesh.world
        processes = (self._running(name), self._mesh.routers.get(name), self._mesh.frontends.get(name))
        if world.is_paused(name) or not any(each is not None and each.is_alive for each in processes):
            return
        began_s = self._mesh.now_s
        world.pause(name)
        await self._wait(fault.duration_s)
        world.resume(name)
        self._broke(name, began_s)

    # Engines

    async def _refuse(self, fault: TimedFault) -> None:
        worker = self._running(fault.target)
        if worker is not None:
            worker.engine.inject(Refuse(fraction=fault.amount))
            if await self._wait_to_heal(fault.duration_s, "refuse", worker):
                worker.engine.inject(Refuse(fraction=0.0))

    async def _stall(self, fault: TimedFault) -> None:
        if (worker := self._running(fault.target)) is not None:
            worker.engine.inject(Stall(duration_s=fault.amount))

    async def _slow_steps(self, fault: TimedFault) -> None:
        worker = self._running(fault.target)
        if worker is not None:
            worker.engine.inject(Slow(factor=fault.amount))
            if await self._wait_to_heal(fault.duration_s, "slow-steps", worker):
                worker.engine.inject(Slow(factor=1.0))

    async def _lose_kv(self, fault: TimedFault) -> None:
        if (worker := self._running(fault.target)) is not None:
            worker.engine.inject(LoseKv(handles=int(fault.amount)))

    async def _lose_events(self, fault: TimedFault) -> None:
        """All watchers of the worker's KV events lag behind further than their buffers hold."""
        if (worker := self._running(fault.target)) is not None:
            worker.worker.kv_feed.end_watches_nowait()

    # Connections

    async def _partition(self, fault: TimedFault) -> None:
        began_s = self._mesh.now_s
        await self._cut_off([(fault.target, EVERYBODY)], fault.duration_s)
        self._broke(fault.target, began_s)

    async def _cut(self, fault: TimedFault) -> None:
        began_s = self._mesh.now_s
        await self._cut_off([(fault.target, fault.other)], fault.duration_s)
        self._broke(fault.target, began_s)

    async def _part_frontend(self, fault: TimedFault) -> None:
        began_s = self._mesh.now_s
        servers = [*self._mesh.workers, *self._mesh.routers]
        await self._cut_off([(name, fault.target) for name in servers], fault.duration_s)
        self._broke(fault.target, began_s)

    async def _cut_off(self, ends: list[tuple[str, str]], duration_s: float) -> None:
        await asyncio.gather(*(self._cut_one(name, client, duration_s) for name, client in ends))

    async def _cut_one(self, name: str, client: str, duration_s: float) -> None:
        network, only = self._mesh.world.network, None if client == EVERYBODY else client
        network.partition(self._mesh.address_of(name), client=only)
        if await self._wait_to_heal(duration_s, "cut", name, client):
            network.heal(self._mesh.address_of(name), client=only)

    async def _reset(self, fault: TimedFault) -> None:
        self._mesh.world.network.reset(self._mesh.address_of(fault.target))
        self._broke(fault.target, self._mesh.now_s)

    async def _slow_link(self, fault: TimedFault) -> None:
        address = self._mesh.address_of(fault.target)
        self._mesh.world.network.slow(address, fault.amount)
        if await self._wait_to_heal(fault.duration_s, "slow-link", address):
            self._mesh.world.network.slow(address, 0.0)

    async def _fail_pulls(self, fault: TimedFault) -> None:
        self._mesh.world.kv_network.fails_pulls = True
        if await self._wait_to_heal(fault.duration_s, "fail-pulls"):
            self._mesh.world.kv_network.fails_pulls = False

    async def _hang_pulls(self, fault: TimedFault) -> None:
        self._mesh.world.kv_network.hangs_pulls = True
        if await self._wait_to_heal(fault.duration_s, "hang-pulls"):
            self._mesh.world.kv_network.hangs_pulls = False

    async def _slow_kv(self, fault: TimedFault) -> None:
        network = self._mesh.world.kv_network
        network.bandwidth = self._mesh.shape.latencies.kv_bytes_per_s / SLOW_KV_FACTOR
        if await self._wait_to_heal(fault.duration_s, "slow-kv"):
            network.bandwidth = self._mesh.shape.latencies.kv_bytes_per_s

    # Registry, leader, clocks

    async def _lose_registry(self, fault: TimedFault) -> None:
        candidate = self._mesh.candidates.get(fault.target)
        worker = self._running(fault.target)
        registry = candidate.registry if candidate is not None else worker.registry if worker is not None else None
        if registry is None:
            return
        registry.set_reachable(False)
        is_last = await self._wait_to_heal(fault.duration_s, "lose-registry", registry)
        if is_last and (candidate is not None or (worker is not None and self._is_same(worker))):
            registry.set_reachable(True)

    async def _registry_away(self, fault: TimedFault) -> None:
        self._mesh.world.agent.set_away(True)
        if await self._wait_to_heal(fault.duration_s, "registry-away"):
            self._mesh.world.agent.set_away(False)

    async def _registry_empty(self, fault: TimedFault) -> None:
        """Away, and without its state afterwards."""
        await self._registry_away(fault)
        self._mesh.world.agent.lose_state()
        self._mesh.registry_lost_s = self._mesh.now_s

    async def _clock_jump(self, fault: TimedFault) -> None:
        self._mesh.world.clock_of(fault.target).skew_s += fault.amount

    async def _resign(self, fault: TimedFault) -> None:
        try:
            await self._mesh.world.run_in(fault.target, self._mesh.candidates[fault.target].resign())
        except MeshError as error:
            self._mesh.world.trace.note("resign-failed", fault.target, error.reason)

    async def _suspend(self, fault: TimedFault) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.stand_still(fault.amount)
