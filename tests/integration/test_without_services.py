"""A mesh of real processes whose planner is stopped or killed, or whose only router hangs: clients do not notice."""

import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvmesh.discovery.base import ROUTER
from tests.integration.mesh import (
    RunningMesh,
    argv_simulated,
    chat,
    metrics_text,
    process_state,
    running_mesh,
    stop_process,
    wait_until,
    worker_metric,
)
from tests.patience import PATIENCE_S

TEXT = "a prompt of some length " * 20
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningMesh]:
    """A mesh whose planner acts, so it watches the mesh."""
    argv = argv_simulated("--no-gateway", "--prefill", "2", "--decode", "2", "--plan", "--restarts-max", "0")
    async with running_mesh(tmp_path_factory.mktemp("mesh"), *argv) as running:
        yield running


async def answer(mesh: RunningMesh) -> object:
    return (await chat(mesh.url, TEXT, max_tokens=12, temperature=0))["choices"]


async def placed_requests(mesh: RunningMesh) -> float:
    """Returns how many requests the router has placed."""
    registry = mesh.target.registry()
    try:
        (router,) = (await registry.instances(ROUTER)).instances
    finally:
        await registry.aclose()
    text = await metrics_text(router.host, int(router.meta["metrics_port"]))
    return worker_metric(text, "kvmesh_router_placed_requests_total")


async def test_requests_are_answered_while_the_router_hangs(mesh: RunningMesh) -> None:
    """The frontend stops using the router and places requests itself. The answers are the same."""
    expected = await answer(mesh)
    assert len(mesh.pids("frontend")) == 1 and not mesh.pids("gateway")
    (router,) = mesh.pids("router")
    log = mesh.directory / "frontend-0.log"

    async def is_placed_by_the_router() -> bool:
        before = await placed_requests(mesh)
        return await answer(mesh) == expected and await placed_requests(mesh) > before

    # The frontend places requests itself, and logs that, until it has a stream to the router.
    await wait_until(is_placed_by_the_router, PATIENCE_S, "the frontend uses the router")
    before = log.read_text().count("placing_without_router")
    await stop_process(router)
    try:
        for _ in range(4):
            assert await answer(mesh) == expected
        assert log.read_text().count("placing_without_router") == before + 1, log.read_text()
    finally:
        os.kill(router, signal.SIGCONT)
    assert await answer(mesh) == expected


async def test_requests_are_answered_without_the_planner(mesh: RunningMesh) -> None:
    """The answers are the same while the planner is stopped and after it was killed."""
    expected = await answer(mesh)
    (planner,) = mesh.pids("planner")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(planner, number)
        for _ in range(8):
            assert await answer(mesh) == expected
    await wait_until(lambda: process_state(planner) == "Z", PATIENCE_S, "the planner ends")
    assert mesh.process.returncode is None
