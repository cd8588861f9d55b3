"""Meshes of real processes whose legs start at once: KV over NIXL, bootstrap servers over HTTP, killed workers."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvmesh.discovery.base import DECODE, PREFILL, Instance
from tests.integration.mesh import (
    RunningMesh,
    argv_simulated,
    chat,
    metrics_text,
    running_mesh,
    wait_until,
    worker_metric,
)
from tests.integration.test_mesh_simulated import instances
from tests.parts import require_part
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
RENDEZVOUS = ("--engine-args=--simulated-handoff rendezvous",)
PROMPTS = ["word " * count for count in (1, 3, 10, 40, 100, 200, 400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The answers of a single engine."""
    argv = argv_simulated("--prefill", "0", "--decode", "1", "--engine-args=--simulated-kv-transport none")
    async with running_mesh(tmp_path_factory.mktemp("alone"), *argv) as alone:
        return [content(await ask(alone, prompt)) for prompt in PROMPTS]


async def ask(mesh: RunningMesh, prompt: str, **options: Any) -> dict[str, Any]:
    return await chat(mesh.url, prompt, max_tokens=24, temperature=0, **options)


def content(answer: dict[str, Any]) -> object:
    return answer["choices"][0]["message"]["content"]


async def total(mesh: RunningMesh, service: str, name: str) -> float:
    found = [await metrics_text(i.host, int(i.meta["metrics_port"])) for i in await instances(mesh.target, service)]
    return sum(worker_metric(text, f"kvmesh_worker_{name}") for text in found)


async def check_free(mesh: RunningMesh) -> None:
    async def used_blocks(instance: Instance) -> float:
        try:
            text = await metrics_text(instance.host, int(instance.meta["metrics_port"]))
        except aiohttp.ClientError:
            return 0.0  # The registry still lists a killed worker for some time.
        return worker_metric(text, "kvmesh_worker_kv_blocks_used")

    async def is_free() -> bool:
        found = [*await instances(mesh.target, PREFILL), *await instances(mesh.target, DECODE)]
        return not any([await used_blocks(each) for each in found])

    await wait_until(is_free, PATIENCE_S, "blocks stay in use")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(expected: list[object], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningMesh]:
    require_part("nixl")
    argv = argv_simulated("--prefill", "2", "--decode", "2", *RENDEZVOUS)
    async with running_mesh(tmp_path_factory.mktemp("rendezvous"), *argv) as running:
        yield running


async def test_the_same_answers_as_one_engine(mesh: RunningMesh, expected: list[object]) -> None:
    """Answers equal those of one engine, for sequential and for concurrent requests. No decode worker computes a prompt, and blocks are freed
    on both sides."""
    assert [content(await ask(mesh, prompt)) for prompt in PROMPTS] == expected
    again = await asyncio.gather(*(ask(mesh, prompt) for prompt in PROMPTS * 3))
    assert [content(answer) for answer in again] == expected * 3
    assert await total(mesh, DECODE, "prompt_tokens_total") == 0
    assert await total(mesh, DECODE, "transferred_tokens_total") > 0
    await check_free(mesh)


async def test_single_tokens_and_choices(mesh: RunningMesh) -> None:
    single = await chat(mesh.url, "one token", max_tokens=1, temperature=0)
    assert single["usage"]["completion_tokens"] == 1  # type: ignore[index]
    several: Any = await ask(mesh, "three of them", n=3)
    assert len(several["choices"]) == 3
    await check_free(mesh)


async def test_killed_workers(mesh: RunningMesh, expected: list[object]) -> None:
    """One of two prefill workers and one of two decode workers are killed under load: all answers are right, and no block stays in use."""
    for service in ("prefill", "decode"):
        answers = asyncio.gather(*(ask(mesh, prompt) for prompt in PROMPTS * 6))
        await asyncio.sleep(0.05)
        os.kill(mesh.pids(service)[0], signal.SIGKILL)
        assert [content(answer) for answer in await answers] == expected * 6
    await check_free(mesh)
