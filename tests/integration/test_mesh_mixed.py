"""One mesh with two engines: a vLLM pair and SGLang workers serve one model under one name."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvmesh.discovery.base import DECODE, PREFILL, ROUTER, Instance
from kvmesh.rpc.router.client import GrpcRouterClient
from tests.chaos.rendezvous import VOCABULARY
from tests.integration.mesh import (
    RunningMesh,
    joined_workers,
    metrics_text,
    running_mesh,
    wait_until,
    worker_metric,
)
from tests.integration.test_mesh_simulated import instances
from tests.integration.test_worker_commands import check_roles, command
from tests.parts import require_part
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.sglang,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
]
REQUESTS, AT_ONCE = 120, 12
PROMPTS = [[Random(number).randrange(10, VOCABULARY) for _ in range(40 + 7 * number)] for number in range(20)]
ROUND_ROBIN = "--router-args=--policy round_robin --breaker-pause-min-s 0.2 --breaker-pause-max-s 0.2"


@dataclass(frozen=True, slots=True)
class MixedMesh:
    """The mesh, and the `kvmesh up` that starts each engine's workers."""

    mesh: RunningMesh
    engines: Mapping[str, RunningMesh]
    session: aiohttp.ClientSession

    async def ask(self, prompt: list[int]) -> tuple[int, ...]:
        body = {
            "model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        async with self.session.post(f"{self.mesh.url}/v1/completions", json=body) as response:
            answer: Any = await response.json()
            assert response.status == 200, answer
            return tuple(answer["choices"][0]["token_ids"])

    async def ask_many(self, count: int) -> list[tuple[int, ...]]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> tuple[int, ...]:
            async with gate:
                return await self.ask(PROMPTS[number % len(PROMPTS)])

        return await asyncio.gather(*(one(number) for number in range(count)))

    async def workers(self) -> list[Instance]:
        return [*await instances(self.mesh.target, PREFILL), *await instances(self.mesh.target, DECODE)]

    async def totals(self, name: str) -> Counter[tuple[str, str]]:
        """Returns a metric by engine and service."""
        found: Counter[tuple[str, str]] = Counter()
        for each in await self.workers():
            text = await metrics_text(each.host, int(each.meta["metrics_port"]))
            found[each.meta["engine"], each.service] += int(worker_metric(text, f"kvmesh_worker_{name}"))
        return found

    async def usable_engines(self, *, is_busy: bool = False) -> list[str]:
        """Returns the engine of each usable worker, or with `is_busy` of each worker that has a request."""
        engines = {each.instance_id: each.meta["engine"] for each in await self.workers()}
        (router,) = await instances(self.mesh.target, ROUTER)
        channels = self.mesh.target.channels()
        try:
            views = await GrpcRouterClient(channels, router.address).list_workers(timeout_s=PATIENCE_S)
        finally:
            await channels.aclose()
        usable = [view for view in views if not view.excluded_by and (view.requests_in_flight or not is_busy)]
        return sorted(engines.get(view.worker.worker_id, "") for view in usable)

    async def wait_whole(self) -> None:
        async def is_whole() -> bool:
            return await self.usable_engines() == ["sglang"] * 3 + ["vllm"] * 2

        await wait_until(is_whole, 200.0, "a worker is missing")

    def worker_pids(self, engine: str) -> list[int]:
        return [pid for service in ("prefill", "decode") for pid in self.engines[engine].pids(service)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mixed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MixedMesh]:
    """A vLLM pair, and an SGLang prefill worker with two decode workers, in float32."""
    require_part("sglang")
    require_part("vllm")
    require_part("nixl")
    folder = tmp_path_factory.mktemp("mixed")
    common = ("--greeting", "", "--no-planner")
    async with AsyncExitStack() as stack:
        vllm = await stack.enter_async_context(
            running_mesh(
                folder / "vllm", *common, ROUND_ROBIN, "--engine-args=--vllm-dtype float32", ready_timeout_s=200
            )
        )  # fmt: skip
        engine = "--engine-args=--sglang-dtype float32 --sglang-can-switch-role"
        argv = ("--engine", "sglang", "--decode", "2", *common, engine)
        sglang = await stack.enter_async_context(joined_workers(vllm, folder / "sglang", *argv, ready_timeout_s=200))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield MixedMesh(vllm, {"vllm": vllm, "sglang": sglang}, session)


async def test_no_request_uses_both_engines(mixed: MixedMesh) -> None:
    """Both engines serve and give the same tokens. A leg on the other engine would fail, and its request would be placed again."""
    await mixed.wait_whole()
    before = await mixed.totals("prompt_tokens_total"), await mixed.totals("transferred_tokens_total")
    answers = await mixed.ask_many(REQUESTS)
    by_prompt = [set(answers[number :: len(PROMPTS)]) for number in range(len(PROMPTS))]
    assert all(len(tokens) == 1 for tokens in by_prompt), "in float32 both engines agree on these prompts"

    async def used() -> bool:
        return not any((await mixed.totals("kv_blocks_used")).values())

    await wait_until(used, PATIENCE_S, "blocks stay in use")
    computed, transferred = await mixed.totals("prompt_tokens_total"), await mixed.totals("transferred_tokens_total")
    computed.subtract(before[0])
    transferred.subtract(before[1])
    for engine in ("vllm", "sglang"):
        assert transferred[engine, DECODE] > 0, f"{engine} served nothing"
    assert computed["sglang", DECODE] == 0
    log = (mixed.mesh.directory / "gateway-0.log").read_text()
    assert "request_finished" in log
    again = {json.loads(line)["reason"] for line in log.splitlines() if '"event":"request_placed_again"' in line}
    assert again <= {"worker_silent"}  # A busy machine may delay heartbeats.
    assert sum((await mixed.totals("failed_handoffs_total")).values()) == 0


async def test_an_sglang_worker_changes_roles(mixed: MixedMesh) -> None:
    """The role changes while the vLLM pair is drained. Requests in flight end first, or continue on the other decode worker."""
    await mixed.wait_whole()
    drained = [each.instance_id for each in await mixed.workers() if each.meta["engine"] == "vllm"]
    for name in drained:
        assert (await command(mixed.mesh, "drain", name))[0] == 0
    before = await mixed.totals("prompt_tokens_total")
    await check_roles(mixed.mesh)
    after = await mixed.totals("prompt_tokens_total")
    assert [after["vllm", service] - before["vllm", service] for service in (PREFILL, DECODE)] == [0, 0]
    for name in drained:
        assert (await command(mixed.mesh, "drain", name, "--undo"))[0] == 0


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_either_pair_may_die(mixed: MixedMesh, engine: str) -> None:
    """All workers of one engine are killed under load: the other engine answers every request with the same tokens."""
    await mixed.wait_whole()
    expected = await mixed.ask_many(len(PROMPTS))
    answers = asyncio.create_task(mixed.ask_many(4 * len(PROMPTS)))
    await wait_until(lambda: mixed.usable_engines(is_busy=True), PATIENCE_S, "nothing runs")
    for pid in mixed.worker_pids(engine):
        os.kill(pid, signal.SIGKILL)
    assert await answers == expected * 4
