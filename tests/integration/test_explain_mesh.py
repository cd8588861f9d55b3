"""`kvmesh explain` on a mesh of real processes: the id that a client got is the id that works."""

import asyncio
import sys
from pathlib import Path

import aiohttp

from kvmesh.discovery.base import ROUTER
from kvmesh.rpc.router.client import GrpcRouterClient
from tests.integration.mesh import ROOT, RunningMesh, argv_simulated, running_mesh, wait_until
from tests.patience import PATIENCE_S


async def explain(mesh: RunningMesh, request_id: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", "explain", request_id, *mesh.flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode()


async def all_join(mesh: RunningMesh) -> bool:
    registry, channels = mesh.target.registry(), mesh.target.channels()
    try:
        routers = (await registry.instances(ROUTER)).instances
        views = await GrpcRouterClient(channels, routers[0].address).list_workers(timeout_s=PATIENCE_S)
        return len(views) == 4 and not any(view.excluded_by for view in views)
    finally:
        await channels.aclose()
        await registry.aclose()


async def test_the_clients_id_explains_its_request(tmp_path: Path) -> None:
    """The header, the answer's id, the mesh's id beside a client's own; one prompt of several; an id nobody knows."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "why did you go there " * 8}], "max_tokens": 3}
    async with (
        running_mesh(tmp_path, *argv_simulated("--prefill", "2", "--decode", "2")) as mesh,
        aiohttp.ClientSession() as session,
    ):
        await wait_until(lambda: all_join(mesh), PATIENCE_S, "all four workers are in use")
        async with session.post(f"{mesh.url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            given = response.headers["x-request-id"]
        status, text = await explain(mesh, given)
        assert status == 0, text
        assert f"request   {given}" in text
        assert all(
            word in text for word in ("prefill prefill-", "decode decode-", "observed", "margin", "finished after")
        )
        assert text.count("\n*  ") == 1
        assert sum("prefill-" in line and "decode-" in line for line in text.splitlines()) >= 4
        assert (await explain(mesh, answer["id"]))[0] == 0

        own = {"x-request-id": "my-own-id"}
        async with session.post(f"{mesh.url}/v1/chat/completions", json=body, headers=own) as response:
            assert response.headers["x-request-id"] == "my-own-id"
            status, text = await explain(mesh, response.headers["x-kvmesh-request-id"])
            assert status == 0, text

        several = {"model": "demo", "prompt": ["one two three", "four five six"], "max_tokens": 2}
        async with session.post(f"{mesh.url}/v1/completions", json=several) as response:
            assert response.status == 200
            status, text = await explain(mesh, response.headers["x-request-id"])
            assert status == 0, text

        status, text = await explain(mesh, "never-sent")
        assert status == 1
        assert text.startswith("kvmesh: no router knows a request 'never-sent'")
        assert "Traceback" not in text
