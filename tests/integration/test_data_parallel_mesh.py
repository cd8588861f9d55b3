"""Meshes of real processes whose workers have two data-parallel ranks, each of which is a separate target."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvmesh.discovery.base import DECODE, PREFILL, ROUTER
from kvmesh.rpc.router.client import GrpcRouterClient
from tests.integration.mesh import RunningMesh, argv_simulated, chat, running_mesh, wait_until
from tests.integration.test_mesh_simulated import instances
from tests.parts import require_part
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS = ["word " * count for count in (30, 60, 100, 200, 300)]
RANKS = (0, 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The answers of a single engine."""
    argv = argv_simulated("--prefill", "0", "--engine-args=--simulated-kv-transport none")
    async with running_mesh(tmp_path_factory.mktemp("alone"), *argv) as alone:
        return [content(await ask(alone, prompt)) for prompt in PROMPTS]


async def ask(mesh: RunningMesh, prompt: str) -> dict[str, Any]:
    return await chat(mesh.url, prompt, max_tokens=24, temperature=0)


def content(answer: dict[str, Any]) -> object:
    return answer["choices"][0]["message"]["content"]


async def pinned(mesh: RunningMesh, prompt: str, pins: dict[str, str]) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": prompt}], "max_tokens": 24, "temperature": 0}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{mesh.url}/v1/chat/completions", json=body, headers=pins) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


@pytest.mark.proves("data_parallel_ranks", engine="simulated")
@pytest.mark.parametrize("handoff", ["sequential", "rendezvous"])
async def test_ranks_are_targets_of_their_own(handoff: str, expected: list[object], tmp_path: Path) -> None:
    """The router uses both ranks of both workers, a pin selects one, and each rank has its own cache."""
    require_part("nixl")
    flags = f"--engine-args=--simulated-data-parallel-size 2 --simulated-handoff {handoff}"
    argv = argv_simulated(flags, "--frontend-args=--http-allows-pins")
    async with running_mesh(tmp_path, *argv) as mesh:
        answers = await asyncio.gather(*(ask(mesh, prompt) for prompt in PROMPTS * 6))
        assert [content(answer) for answer in answers] == expected * 6
        expected_ranks = {(service, rank) for service in (PREFILL, DECODE) for rank in RANKS}

        async def all_have_blocks() -> bool:
            return await ranks_with_blocks(mesh) == expected_ranks

        # The workers' events reach the router after the answers.
        await wait_until(all_have_blocks, PATIENCE_S, mesh.logs)
        (prefill,), (decode,) = await instances(mesh.target, PREFILL), await instances(mesh.target, DECODE)
        for rank in RANKS:
            pins = {
                "x-kvmesh-pin-prefill": f"{prefill.instance_id}/{rank}",
                "x-kvmesh-pin-decode": f"{decode.instance_id}/{1 - rank}",
            }
            prompt = f"rank {rank} " * 60
            first, again = [await pinned(mesh, prompt, pins) for _ in range(2)]
            assert content(first) == content(again)
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            other = await pinned(mesh, prompt, {**pins, "x-kvmesh-pin-prefill": f"{prefill.instance_id}/{1 - rank}"})
            assert content(other) == content(first)


async def ranks_with_blocks(mesh: RunningMesh) -> set[tuple[str, int]]:
    """Returns the roles and ranks for which the router's index has cached blocks."""
    (router,) = await instances(mesh.target, ROUTER)
    channels = mesh.target.channels()
    try:
        views = await GrpcRouterClient(channels, router.address).list_workers(timeout_s=PATIENCE_S)
    finally:
        await channels.aclose()
    return {
        (f"kvmesh-{view.role.value}", view.worker.data_parallel_rank)
        for view in views
        if view.worker.data_parallel_rank is not None and view.index_blocks
    }
