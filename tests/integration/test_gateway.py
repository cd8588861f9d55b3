"""A frontend process that hosts its router: `python -m services.gateway`, which `kvmesh up` starts."""

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from kvmesh.discovery.base import FRONTEND, ROUTER
from kvmesh.rpc.router.client import GrpcRouterClient
from services.gateway.__main__ import split
from tests.integration.mesh import (
    RunningMesh,
    argv_simulated,
    metrics_text,
    process_state,
    running_mesh,
    wait_until,
    worker_metric,
)
from tests.patience import PATIENCE_S

REQUESTS = 24


def body(tokens: int, *, stream: bool = False) -> dict[str, object]:
    """Returns a chat request for exactly so many tokens."""
    messages = [{"role": "user", "content": "Tell me a story about two rivers."}]
    return {"model": "demo", "messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": stream}


async def ask(url: str, tokens: int, request_id: str = "") -> dict[str, object]:
    """Returns a whole answer."""
    headers = {"x-request-id": request_id} if request_id else {}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/chat/completions", json=body(tokens)) as response,
    ):
        assert response.status == 200, await response.text()
        return dict(await response.json())


async def check_both_parts(mesh: RunningMesh, gateway: int) -> None:
    """Checks that both parts are registered and export their metrics, and that the router explains placements over gRPC."""
    assert not mesh.pids("frontend")
    assert not mesh.pids("router")
    answers = await asyncio.gather(*(ask(mesh.url, 4, f"request-{number}") for number in range(REQUESTS)))
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [4] * REQUESTS  # type: ignore[index]
    registry = mesh.target.registry()
    channels = mesh.target.channels()
    try:
        (frontend,) = (await registry.instances(FRONTEND)).instances
        (router,) = (await registry.instances(ROUTER)).instances
        client = GrpcRouterClient(channels, router.address)
        explained = await client.explain(str(answers[0]["id"]).removeprefix("chatcmpl-"), timeout_s=PATIENCE_S)
        assert explained.placement is not None
        assert {worker.worker for worker in await client.list_workers(timeout_s=PATIENCE_S)}
        text = await metrics_text(router.host, int(router.meta["metrics_port"]))
        assert worker_metric(text, "kvmesh_router_placed_requests_total") >= REQUESTS
        text = await metrics_text(frontend.host, int(frontend.meta["metrics_port"]))
        assert worker_metric(text, "kvmesh_frontend_requests_total") >= REQUESTS
    finally:
        await channels.aclose()
        await registry.aclose()
    assert await _all_settled(mesh)
    os.kill(gateway, 0)


async def _all_settled(mesh: RunningMesh) -> bool:
    """Waits until the router has settled all reservations."""
    registry = mesh.target.registry()
    channels = mesh.target.channels()
    try:
        (router,) = (await registry.instances(ROUTER)).instances
        client = GrpcRouterClient(channels, router.address)

        async def is_empty() -> bool:
            return not any(worker.requests_in_flight for worker in await client.list_workers(timeout_s=PATIENCE_S))

        await wait_until(is_empty, PATIENCE_S, "reservations are settled")
        return True
    finally:
        await channels.aclose()
        await registry.aclose()


async def test_one_process_is_frontend_and_router(tmp_path: Path) -> None:
    """Both parts are registered, export metrics and explain placements.

    After SIGTERM in the middle of a stream, the stream continues to its last token, and then the process ends without an error.
    """
    # If a busy machine delays one decode worker, the other one answers.
    flags = argv_simulated("--decode", "2", "--engine-args=--simulated-time-factor 1", "--restarts-max", "0")
    async with running_mesh(tmp_path, *flags) as mesh:
        (gateway,) = mesh.pids("gateway")
        await check_both_parts(mesh, gateway)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{mesh.url}/v1/chat/completions", json=body(200, stream=True)) as response,
        ):
            lines = response.content
            assert (await lines.readline()).startswith(b"data: ")
            os.kill(gateway, signal.SIGTERM)
            rest = [line async for line in lines if line.startswith(b"data: ")]
        assert rest[-1] == b"data: [DONE]\n"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        await wait_until(lambda: _has_ended(gateway), PATIENCE_S, "the process ends")
        log = (tmp_path / "gateway-0.log").read_text()
        assert "Traceback" not in log
        await asyncio.wait_for(mesh.process.wait(), PATIENCE_S)
        await wait_until(
            lambda: any("gateway-0" in line and "giving up after" in line for line in mesh.output),
            PATIENCE_S,
            mesh.logs,
        )


async def _has_ended(pid: int) -> bool:
    return process_state(pid) == "Z"


@pytest.mark.parametrize("is_routers", [True, False])
async def test_a_part_that_fails_ends_the_process(*, is_routers: bool) -> None:
    """If either part fails, the process exits with status 1 and a message, and stops the other part, even without a registry."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flag = ("--telemetry-metrics-port", str(taken.getsockname()[1]))
        argv = ("--http-port", "0", "--", *flag) if is_routers else ("--http-port", "0", *flag)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.gateway", "--discovery-address", "127.0.0.1:1", *argv),
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(PATIENCE_S):
            _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().strip().splitlines()[-1].startswith("MetricsServer failed while starting")


def test_flags_are_divided() -> None:
    """The words before `--` are the frontend's flags, those after it the router's."""
    assert split(["--a", "1", "--", "--b", "2"]) == (["--a", "1"], ["--b", "2"])
    assert split(["--a"]) == (["--a"], ())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--processes", "2"], "a gateway is one process"),
        (["--http-port", "99999999"], "--http-port"),
        (["--", "--policy-of-none", "1"], "--policy-of-none"),
        (["--", "--cost-temperature", "cold"], "--cost-temperature"),
    ],
)
async def test_wrong_flags_end_the_process_with_a_message(argv: list[str], words: str) -> None:
    """Wrong flags of either part end the process with a message that names the flag, and without a stack trace."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.gateway", *argv), stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        _, errors = await process.communicate()
    assert process.returncode
    assert words in errors.decode()
    assert "Traceback" not in errors.decode()
