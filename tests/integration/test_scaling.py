"""`kvmesh up --plan` starts and stops workers on calls to its ScalerService, while requests run."""

import asyncio
import re
from pathlib import Path

import pytest

from kvmesh.core import Role
from kvmesh.core.planning import PoolState, PoolTarget
from kvmesh.errors import MeshError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.scaler_client import GrpcScalerClient
from kvmesh.rpc.worker_client import GrpcWorkerClient
from tests.integration.mesh import RunningMesh, argv_simulated, chat, running_mesh, wait_until
from tests.integration.test_worker_commands import command
from tests.patience import PATIENCE_S

ADDRESS = re.compile(r"pools are sized through (\S+)")
PROMPTS = [f"prompt {number}, of some length " * 8 for number in range(8)]


async def answers(mesh: RunningMesh) -> list[object]:
    asked = [chat(mesh.url, prompt, max_tokens=30, temperature=0) for prompt in PROMPTS]
    return [answer["choices"][0]["message"]["content"] for answer in await asyncio.gather(*asked)]  # type: ignore[index]


async def repeat(mesh: RunningMesh, expected: list[object]) -> None:
    while True:
        assert await answers(mesh) == expected


class Scaler:
    """A client of the mesh's scaler."""

    def __init__(self, channels: ChannelPool, address: str) -> None:
        self.client = GrpcScalerClient(channels, address)
        self.workers = GrpcWorkerClient(channels)

    async def pools(self) -> dict[Role, PoolState]:
        return {pool.role: pool for pool in await self.client.list_pools(timeout_s=PATIENCE_S)}

    async def scale(self, role: Role, workers: int, *drain: str, token: int = 0) -> int:
        target = PoolTarget(model="demo", role=role, workers=workers, drain_worker_ids=drain)
        return await self.client.scale(target, fencing_token=token, timeout_s=PATIENCE_S)

    async def wait_ready(self, prefill: int, decode: int) -> None:
        async def is_reached() -> bool:
            pools = await self.pools()
            return [len(pools[role].ready_worker_ids) for role in (Role.PREFILL, Role.DECODE)] == [prefill, decode]

        await wait_until(is_reached, PATIENCE_S, f"{prefill} prefill and {decode} decode workers are ready")


async def test_pools_grow_and_shrink_under_load(tmp_path: Path) -> None:
    """No request fails or changes its answer. Workers that the call names are stopped first, and a role change moves a worker's place to the
    other pool."""
    argv = argv_simulated("--plan", "--engine-args=--simulated-time-factor 1", "--planner-args=--mode observe")
    async with running_mesh(tmp_path, *argv) as mesh:
        (address,) = [found.group(1) for line in mesh.output if (found := ADDRESS.search(line))]
        channels = mesh.target.channels()
        scaler = Scaler(channels, address)
        expected = await answers(mesh)
        running = asyncio.create_task(repeat(mesh, expected))
        try:
            await scaler.wait_ready(1, 1)
            (first,) = (await scaler.pools())[Role.DECODE].ready_worker_ids
            assert await scaler.scale(Role.DECODE, 3, token=5) == 3
            assert await scaler.scale(Role.PREFILL, 2, token=5) == 2
            await scaler.wait_ready(2, 3)
            moved = next(each for each in (await scaler.pools())[Role.DECODE].ready_worker_ids if each != first)
            assert (await command(mesh, "role", moved, "prefill"))[0] == 0
            await scaler.wait_ready(3, 2)
            pools = await scaler.pools()
            assert {role: pool.workers_wanted for role, pool in pools.items()} == {Role.PREFILL: 3, Role.DECODE: 2}
            assert await scaler.scale(Role.DECODE, 1, first, token=6) == 1
            assert await scaler.scale(Role.PREFILL, 0, token=6) == 0
            await scaler.wait_ready(0, 1)
            assert first not in (await scaler.pools())[Role.DECODE].ready_worker_ids
            assert await scaler.scale(Role.DECODE, 0, token=6) == 1, "a mesh needs a decode worker"
            with pytest.raises(MeshError) as refusal:
                await scaler.scale(Role.DECODE, 4, token=5)
            assert refusal.value.reason == "not_leader"
            assert await answers(mesh) == expected
        finally:
            running.cancel()
            await asyncio.wait([running])
            await channels.aclose()
        assert running.cancelled(), f"{running.exception()}\n{mesh.logs()}"
