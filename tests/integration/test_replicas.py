"""Two routers and three frontends as real processes: one router is killed in the middle of 1 000 requests."""

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvmesh.discovery.base import DECODE, FRONTEND, ROUTER, Instance, Registry
from tests.integration.mesh import RunningMesh, argv_simulated, metrics_text, running_mesh, wait_until, worker_metric
from tests.patience import PATIENCE_S

REQUESTS = 1000
KILLED_AFTER, STARTED_MAX = 300, 450
"""Answers before the kill, and requests that start before it."""
FRONTENDS = 3
PLACED = "kvmesh_router_placed_requests_total"
AT_A_TIME = 16
"""Requests in flight per frontend."""

PATIENT = f"--router-answer-timeout-s={PATIENCE_S:g}"
"""A frontend that gives up a slow router sends no more requests to it. The connections to a killed router break at once."""
ENGINE_ARGS = "--simulated-time-factor 0.2 --simulated-running-requests-max 256"


@asynccontextmanager
async def frontend_process(mesh: RunningMesh, number: int) -> AsyncIterator[None]:
    """Starts another frontend of the mesh."""
    flags = (*mesh.service_flags, "--http-port", "0", "--telemetry-log-level", "warning", PATIENT)
    with (mesh.directory / f"more-frontends-{number}.log").open("w") as log:
        running = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.frontend", *flags, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


async def passing(registry: Registry, service: str) -> list[Instance]:
    """Returns the service's instances that take requests."""
    return [instance for instance in (await registry.instances(service)).instances if instance.takes_requests]


async def metric(instances: list[Instance], name: str) -> list[float]:
    """Returns a metric of each instance."""
    texts = [await metrics_text(each.host, int(each.meta["metrics_port"])) for each in instances]
    return [worker_metric(text, name) for text in texts]


async def models(url: str) -> list[str]:
    """Returns the models that a frontend serves."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        return [each["id"] for each in (await response.json())["data"]]


async def ask(url: str) -> None:
    """Sends one request, and checks that it is answered."""
    body = {"model": "demo", "prompt": "one two three", "max_tokens": 2}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()


class Load:
    """Sends `REQUESTS` requests, spread over all frontends. At most STARTED_MAX of them start before `killed` is set."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls
        self._numbers = iter(range(REQUESTS))
        self.statuses: Counter[int] = Counter()
        self.problems: list[str] = []
        self.killing = asyncio.Event()
        self.killed = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for url in self._urls:
                session = aiohttp.ClientSession()
                clients = [tasks.create_task(self._client(session, url)) for _ in range(AT_A_TIME)]
                tasks.create_task(_close_after(session, clients))

    async def _client(self, session: aiohttp.ClientSession, url: str) -> None:
        for number in self._numbers:
            if number >= STARTED_MAX:
                await self.killed.wait()
            generator = random.Random(number)
            prompt = [5 + (generator.randrange(20) * 7 + i) % 200 for i in range(generator.randrange(8, 120))]
            body = {"model": "demo", "prompt": prompt, "max_tokens": generator.randrange(1, 24), "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.json()
            self.statuses[response.status] += 1
            if response.status != 200 or answer["usage"]["completion_tokens"] != body["max_tokens"]:
                self.problems.append(f"{number}: {response.status} {answer}")
            if sum(self.statuses.values()) >= KILLED_AFTER:
                self.killing.set()


async def _close_after(session: aiohttp.ClientSession, clients: list[asyncio.Task]) -> None:
    await asyncio.wait(clients)
    await session.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_killed_router_fails_no_request(tmp_path: Path) -> None:
    """All 1 000 requests get complete answers, and the other router settles the reservations of the dead one."""
    flags = ("--routers", "2", "--decode", "2", "--restarts-max", "0", "--log-level", "warning")
    argv = argv_simulated(*flags, "--engine-args", ENGINE_ARGS, f"--frontend-args={PATIENT}")
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(running_mesh(tmp_path, *argv))
        registry = mesh.target.registry()
        stack.push_async_callback(registry.aclose)
        for number in range(1, FRONTENDS):
            await stack.enter_async_context(frontend_process(mesh, number))

        async def all_take_requests() -> bool:
            return len(await passing(registry, FRONTEND)) == FRONTENDS and len(await passing(registry, ROUTER)) == 2

        await wait_until(all_take_requests, 90, "frontends and routers take requests")
        frontends, routers = await passing(registry, FRONTEND), await passing(registry, ROUTER)

        async def all_see_all() -> bool:
            seen = [await metric(routers, f"kvmesh_router_{what}") for what in ("peers", "decode_workers")]
            return seen == [[1, 1], [2, 2]]

        await wait_until(all_see_all, PATIENCE_S, "the routers know each other and the workers")
        urls = [f"http://{each.host}:{each.meta['http_port']}" for each in frontends]

        async def all_serve_the_model() -> bool:
            return all([await models(url) == ["demo"] for url in urls])

        await wait_until(all_serve_the_model, PATIENCE_S, "every frontend knows the model")

        async def uses_both(url: str) -> bool:
            before = await metric(routers, PLACED)
            for _ in routers:
                await ask(url)
            return all(now > then for now, then in zip(await metric(routers, PLACED), before, strict=True))

        for url in urls:
            await wait_until(lambda url=url: uses_both(url), PATIENCE_S, "the frontend has streams to both routers")
        before = await metric(routers, PLACED)
        load = Load(urls)
        running = asyncio.create_task(load.run())
        await load.killing.wait()
        placed = [now - then for now, then in zip(await metric(routers, PLACED), before, strict=True)]
        assert min(placed) > KILLED_AFTER / 4, placed
        killed = next(pid for pid in mesh.pids("router"))
        os.kill(killed, signal.SIGKILL)
        load.killed.set()
        await running
        assert not load.problems, (len(load.problems), load.problems[:5])
        assert load.statuses == {200: REQUESTS}

        alive = [each for each in routers if not each.instance_id.endswith(f"-{killed}")]
        assert len(alive) == 1
        assert sum(placed) < REQUESTS / 2 < sum(await metric(alive, PLACED))

        left: dict[str, list[float]] = {}

        async def nothing_is_left() -> bool:
            workers = await passing(registry, DECODE)
            left["reservations"] = await metric(alive, "kvmesh_router_reservations")
            left["legs"] = await metric(workers, "kvmesh_decode_legs_requests")
            return not any(sum(each) for each in left.values())

        # Reservations of the dead router that no other router adopted end after a grace period of 10 s.
        await wait_until(nothing_is_left, PATIENCE_S, lambda: f"none left: {left}\n{mesh.logs()}")
