"""The pools of `kvmesh up` while a worker changes its role."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvmesh.cli.children import Child, ChildSpec
from kvmesh.cli.keeper import Keeper, RestartPolicy, Slot, instance_id
from kvmesh.cli.scaler import LocalScaler
from kvmesh.core import Role
from kvmesh.core.planning import PoolTarget
from kvmesh.discovery.base import DECODE, PREFILL, ROLE_CHANGE, Registration
from kvmesh.simulation.registry import MemoryAgent
from tests.conformance.manual_clock import ManualClock
from tests.patience import PATIENCE_S
from tests.unit.test_cli_keeper import FakeProcess

SERVICES = {Role.PREFILL: PREFILL, Role.DECODE: DECODE}


@dataclass(eq=False)
class Rig:
    """Two prefill and two decode workers, which register immediately."""

    folder: Path
    agent: MemoryAgent = field(default_factory=MemoryAgent)
    slots: list[Slot] = field(default_factory=list)
    pids: int = 1000

    def __post_init__(self) -> None:
        self.registry = self.agent.registry()
        self.keeper = Keeper(
            registry=self.registry,
            clock=ManualClock(),
            policy=RestartPolicy(restarts_max=1, window_s=100.0),
            say=lambda line: None,
            restart=self.begin,
            groups=[self.slots],
        )
        self.scaler = LocalScaler(
            self.keeper,
            self.slots,
            model="demo",
            make_spec=self.spec,
            start=self.begin,
            workers_max={Role.PREFILL: 8, Role.DECODE: 8},
        )

    def spec(self, role: Role, number: int) -> ChildSpec:
        name = f"{role.value}-{number}"
        return ChildSpec(name=name, module=f"services.{role.value}", argv=(), env={}, log_path=self.folder / name)

    async def begin(self, spec: ChildSpec) -> Child:
        self.pids += 1
        child = Child(spec, FakeProcess(self.pids, asyncio.get_running_loop().create_future()))
        role = Role(spec.module.rpartition(".")[2])
        await self.register(instance_id(child), role)
        return child

    async def register(self, worker_id: str, role: Role) -> None:
        registration = Registration(
            service=SERVICES[role], instance_id=worker_id, host="127.0.0.1", port=1, check_interval_s=60.0, ttl_s=60.0
        )
        await self.registry.register(registration)
        await self.registry.heartbeat(worker_id)

    async def sizes(self) -> dict[str, tuple[int, int]]:
        return {each.role.value: (each.workers_wanted, each.workers_running) for each in await self.scaler.pools()}


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    for role in SERVICES:
        for number in range(2):
            await rig.keeper.start(rig.spec(role, number), rig.slots, rig.begin)
    assert await rig.sizes() == {"prefill": (2, 2), "decode": (2, 2)}
    return rig


async def test_a_worker_counts_in_its_new_pool_from_the_beginning_of_its_change(rig: Rig) -> None:
    """A size that a planner sets during the change includes the worker: the scaler starts only the worker that is missing, and stops none."""
    moving = instance_id(rig.slots[0].child)  # type: ignore[arg-type]
    await rig.registry.set_draining(moving, True, reason=ROLE_CHANGE + "decode")
    assert await rig.sizes() == {"prefill": (1, 1), "decode": (3, 3)}
    scaling = asyncio.create_task(rig.scaler.run())
    try:
        for role, workers in ((Role.PREFILL, 1), (Role.DECODE, 4)):
            await rig.scaler.scale(PoolTarget(model="demo", role=role, workers=workers), fencing_token=1)
        async with asyncio.timeout(PATIENCE_S):
            while await rig.sizes() != {"prefill": (1, 1), "decode": (4, 4)}:
                await asyncio.sleep(0)
        assert [slot.spec.name for slot in rig.slots] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
        await rig.register(moving, Role.DECODE)
        await rig.registry.set_draining(moving, False)
        assert await rig.sizes() == {"prefill": (1, 1), "decode": (4, 4)}
        assert len(rig.slots) == 5
    finally:
        scaling.cancel()
        await asyncio.wait([scaling])


@pytest.mark.parametrize("reason", ["drain requested", ROLE_CHANGE + "cook", ROLE_CHANGE])
async def test_a_worker_that_only_drains_stays_in_its_pool(rig: Rig, reason: str) -> None:
    """A worker keeps its pool if its mark has another reason or an unknown role. A worker whose role change fails returns to its pool."""
    moving = instance_id(rig.slots[0].child)  # type: ignore[arg-type]
    await rig.registry.set_draining(moving, True, reason=reason)
    assert await rig.sizes() == {"prefill": (2, 2), "decode": (2, 2)}
    await rig.registry.set_draining(moving, False)
    await rig.registry.set_draining(moving, True, reason=ROLE_CHANGE + "decode")
    assert await rig.sizes() == {"prefill": (1, 1), "decode": (3, 3)}
    await rig.registry.set_draining(moving, False)
    assert await rig.sizes() == {"prefill": (2, 2), "decode": (2, 2)}
