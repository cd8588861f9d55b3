"""Hedged prompts on real processes: a stopped prefill worker does not delay the answer, and later frees the request's blocks."""

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from kvmesh.discovery.base import DECODE, PREFILL, ROUTER
from kvmesh.rpc.router.client import GrpcRouterClient
from tests.integration.mesh import (
    RunningMesh,
    argv_simulated,
    grpc_address,
    metrics_text,
    process_state,
    running_mesh,
    stop_process,
    wait_until,
    worker_metric,
)
from tests.parts import require_part
from tests.patience import PATIENCE_S

FLAGS = (
    *("--prefill", "2", "--decode", "1", "--no-planner", "--no-gateway"),
    # A long prompt takes a second. Neither missed heartbeats nor an expired lease may help, only a hedge and a cancel.
    "--engine-args=--simulated-profile-per-prefill-token-s 0.0006 --worker-heartbeat-s 100 --kv-lease-s 300",
    # On a busy machine one prompt in ten may take several times as long as expected, which must not delay the hedge.
    "--frontend-args=--pipeline-hedge-share-max 0.5 --pipeline-hedge-quantile 0.8",
    "--router-args=--prefill-congested-s 1000",
)
SHORT_TOKENS, LONG_TOKENS = 300, 1800
SAMPLES = 24
"""More prompts than the frontend must have measured before it hedges."""
HEDGED_S = 20.0
HELD = ("kv_blocks_used", "kv_blocks_held", "kv_blocks_unaccounted", "leases_handles", "legs_requests")


@dataclass(slots=True)
class HedgingMesh:
    """A mesh whose prefill workers can be stopped."""

    mesh: RunningMesh
    session: aiohttp.ClientSession
    random: Random = field(default_factory=lambda: Random(3))

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(300, 2000) for _ in range(tokens)]

    async def ask(self, prompt: list[int], **options: Any) -> list[int]:
        """Returns the tokens of the answer."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        url = f"{self.mesh.url}/v1/completions"
        async with self.session.post(url, json={**body, **options}) as response:
            answer: Any = await response.json()
            assert response.status == 200, answer
            return list(answer["choices"][0]["token_ids"])

    async def metrics(self, service: str) -> Mapping[int, str]:
        """Returns the metrics of a service's processes that are not stopped, by process id."""
        registry = self.mesh.target.registry()
        try:
            found = {
                int(each.instance_id.rpartition("-")[2]): each for each in (await registry.instances(service)).instances
            }
        finally:
            await registry.aclose()
        running = {pid: each for pid, each in found.items() if process_state(pid) != "T"}
        return {pid: await metrics_text(each.host, int(each.meta["metrics_port"])) for pid, each in running.items()}

    async def computing(self) -> int:
        """Returns the pid of the prefill worker that computes a prompt; 0 if there is none."""
        texts = await self.metrics(PREFILL)
        return next((pid for pid, text in texts.items() if worker_metric(text, "kvmesh_worker_running_requests")), 0)

    async def hedges_won(self) -> float:
        text = await metrics_text("127.0.0.1", (await grpc_address(self.mesh))[1])
        return worker_metric(text, "kvmesh_frontend_hedges_won_requests_total")

    async def is_free(self) -> bool:
        """Returns whether no running process holds blocks, leases or legs."""
        texts = [*(await self.metrics(PREFILL)).values(), *(await self.metrics(DECODE)).values()]
        return not any(worker_metric(text, f"kvmesh_worker_{name}") for text in texts for name in HELD)

    async def reservations(self) -> int:
        registry, channels = self.mesh.target.registry(), self.mesh.target.channels()
        try:
            (router,) = (await registry.instances(ROUTER)).instances
            workers = await GrpcRouterClient(channels, router.address).list_workers(timeout_s=PATIENCE_S)
            return sum(each.requests_in_flight for each in workers)
        finally:
            await channels.aclose()
            await registry.aclose()

    async def stop_computing(self, asking: "asyncio.Task[list[int]]") -> int:
        """Stops the prefill worker that computes the request's prompt. Returns 0 if the prompt was finished first."""
        while not asking.done():
            if pid := await self.computing():
                await stop_process(pid)
                return pid
        return 0


@pytest.mark.timeout(600)
@pytest.mark.proves("migration", engine="simulated")
async def test_the_prompt_of_a_stopped_prefill_worker_is_hedged(tmp_path: Path) -> None:
    """The answer arrives while the worker is stopped. When the worker continues, the cancel frees its blocks long before the lease ends."""
    require_part("nixl")
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with (
        running_mesh(tmp_path, *argv_simulated(*FLAGS)) as mesh,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        hedged = HedgingMesh(mesh, session)
        stopped, is_hedged = 0, False
        while not stopped:
            prompt = hedged.prompt(LONG_TOKENS)
            # This comes first, because a long prompt may be hedged, and the request after a hedged one is not.
            expected = await hedged.ask(prompt, cache_salt="expected")
            # Also after an attempt without a hedge: its slow prompts must remain a smaller share than the share that may be hedged.
            for _ in range(SAMPLES):
                await hedged.ask(hedged.prompt(SHORT_TOKENS))
            await wait_until(hedged.is_free, PATIENCE_S, mesh.logs())
            won = await hedged.hedges_won()
            asking = asyncio.create_task(hedged.ask(prompt))
            stopped = await hedged.stop_computing(asking)
            try:
                if stopped and not (await asyncio.wait([asking], timeout=HEDGED_S))[0]:
                    # On a busy machine prompts are slow, and a prompt that is expected to be slow is hedged late.
                    os.kill(stopped, signal.SIGCONT)
                    stopped = 0
                assert await asking == expected
                if stopped:
                    assert process_state(stopped) == "T"
                    is_hedged = await hedged.hedges_won() == won + 1
                    await wait_until(hedged.is_free, PATIENCE_S, mesh.logs())
            finally:
                if stopped:
                    os.kill(stopped, signal.SIGCONT)
            if not is_hedged:
                # The prompt was finished before the worker stopped, and the decode worker computed it again.
                stopped = 0
        await wait_until(hedged.is_free, PATIENCE_S, mesh.logs())

        async def is_settled() -> bool:
            return not await hedged.reservations()

        await wait_until(is_settled, PATIENCE_S, "the router has settled all reservations")
