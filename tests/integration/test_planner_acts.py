"""A planner that changes a mesh of processes, with a real Consul and a real Prometheus: pools follow the load, and no request fails.

`KVMESH_PLANNER_CYCLES=10` runs ten cycles instead of one. Pool sizes follow the use of KV, which does not depend on the machine's speed.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvmesh.core import Role
from kvmesh.core.planning import Decision, DecisionAction, DecisionOutcome, PlanReport
from kvmesh.discovery.base import PLANNER as PLANNER_SERVICE
from kvmesh.discovery.base import ROUTER
from kvmesh.rpc.planner_client import GrpcPlannerClient
from tests.integration.mesh import (
    RunningMesh,
    argv_simulated,
    chat,
    metrics_text,
    running_mesh,
    wait_until,
    worker_metric,
)
from tests.patience import PATIENCE_S
from tests.servers import Server

CYCLES = int(os.environ.get("KVMESH_PLANNER_CYCLES", "1"))
CONFIG = Path(__file__).parents[2] / "compose" / "prometheus" / "prometheus.yml"
# 160 blocks of 16 tokens: eight requests of about 250 tokens use most of them.
ENGINE = "--simulated-time-factor 1 --simulated-kv-blocks 160 --simulated-profile-base-s 0.02"
PLANNER = (
    "--interval-s 0.5 --window-s 5 --decide-sizing thresholds --decide-start-s 2 --decide-calm-s 3"
    " --decide-thresholds-kv-high 0.5 --decide-thresholds-kv-low 0.25 --decide-thresholds-backlog-high 1000000 --decide-workers-max 3"
)
IN_FLIGHT = 8


async def ask_until(
    mesh: RunningMesh, number: int, expected: dict[int, object], tokens: int, stop: asyncio.Event
) -> int:
    """Repeats a question until `stop`, and waits for the last answer. Checks that all answers are equal. Returns their number."""
    asked = 0
    while not stop.is_set():
        answer = await chat(mesh.url, f"question {number} " * 10, max_tokens=tokens, temperature=0, ignore_eos=True)
        text = answer["choices"][0]["message"]["content"]  # type: ignore[index]
        assert expected.setdefault(number, text) == text
        asked += 1
    return asked


def decode_ready(plan: PlanReport) -> int:
    return sum(pool.workers_ready for pool in plan.pools if pool.role is Role.DECODE)


@asynccontextmanager
async def planner_of(mesh: RunningMesh) -> AsyncIterator[tuple[str, GrpcPlannerClient]]:
    registry, channels = mesh.target.registry(), mesh.target.channels()
    try:
        (planner,) = (await registry.instances(PLANNER_SERVICE)).instances
        yield planner.instance_id, GrpcPlannerClient(channels, planner.address)
    finally:
        await channels.aclose()
        await registry.aclose()


@pytest.mark.proves("planner", engine="simulated")
async def test_pools_follow_the_load(
    start_consul: Callable[..., Server], start_prometheus: Callable[[Path], Server], tmp_path: Path
) -> None:
    """Under load decode workers start, without it they drain and stop. Answers stay the same, and one leader makes all changes."""
    consul = await asyncio.to_thread(start_consul)
    text = CONFIG.read_text().replace('"127.0.0.1:8500"', f'"{consul.address}"')
    text = text.replace("scrape_interval: 5s", "scrape_interval: 1s").replace(
        "scrape_timeout: 3s", "scrape_timeout: 1s"
    )
    config = tmp_path / "prometheus.yml"
    config.write_text(text)
    prometheus = await asyncio.to_thread(start_prometheus, config)
    argv = argv_simulated(
        "--consul",
        consul.address,
        "--plan",
        f"--engine-args={ENGINE}",
        f"--planner-args={PLANNER} --prometheus {prometheus.url}",
    )
    async with running_mesh(tmp_path, *argv) as mesh, planner_of(mesh) as (planner_id, client):
        expected: dict[int, object] = {}
        decisions: dict[int, Decision] = {}

        def has_ready(wanted: Callable[[int], bool]) -> Callable[[], object]:
            async def is_reached() -> bool:
                plan = await client.get_plan(timeout_s=PATIENCE_S)
                # A plan has only the newest 32 decisions.
                decisions.update({each.number: each for each in plan.decisions})
                return wanted(decode_ready(plan))

            return is_reached

        for cycle in range(CYCLES):
            stop = asyncio.Event()
            busy = [asyncio.create_task(ask_until(mesh, number, expected, 200, stop)) for number in range(IN_FLIGHT)]
            # Requests continue, one after the other, while workers drain.
            calm_stop = asyncio.Event()
            calm = asyncio.create_task(ask_until(mesh, IN_FLIGHT, expected, 20, calm_stop))
            await wait_until(
                has_ready(lambda ready: ready >= 2), 3 * PATIENCE_S, f"cycle {cycle}: a second worker serves"
            )
            assert not any(task.done() for task in (*busy, calm)), "a request failed while a worker started"
            stop.set()
            assert sum(await asyncio.gather(*busy)) >= IN_FLIGHT
            await wait_until(has_ready(lambda ready: ready == 1), 3 * PATIENCE_S, f"cycle {cycle}: one worker is left")
            assert not calm.done(), "a request failed while a worker drained"
            calm_stop.set()
            assert await calm > 0
        plan = await client.get_plan(timeout_s=PATIENCE_S)
        assert plan.source == "prometheus"
        assert (plan.is_leader, plan.leader_id) == (True, planner_id)
        changes = [each for each in decisions.values() if each.action.changes_pools]
        accepted = [each for each in changes if each.outcome is DecisionOutcome.ACCEPTED]
        assert len(accepted) >= 2
        assert {each.action for each in accepted} == {DecisionAction.SCALE}
        assert len({each.fencing_token for each in accepted}) == 1
        assert {each.reason for each in accepted} == {"above_threshold", "below_threshold"}


BURST = 12
PROMPT_WORDS = 300
TTFT_FLAGS = "--interval-s 0.5 --window-s 5 --targets-ttft-s 2 --targets-itl-s 1 --targets-prefill-workers-max 1 --targets-decode-workers-max 1"


async def router_metric(mesh: RunningMesh, name: str) -> float:
    registry = mesh.target.registry()
    try:
        (router,) = (await registry.instances(ROUTER)).instances
    finally:
        await registry.aclose()
    return worker_metric(await metrics_text(router.host, int(router.meta["metrics_port"])), name)


async def test_late_requests_of_a_burst_wait_for_spare_time_and_are_answered(tmp_path: Path) -> None:
    """The planner sends the routers its target. In a burst some requests wait as late ones. All get the same answers as alone."""
    engine = "--simulated-time-factor 1 --simulated-profile-per-prefill-token-s 0.001"
    argv = argv_simulated(
        "--prefill", "1", "--decode", "1", "--plan", f"--engine-args={engine}", f"--planner-args={TTFT_FLAGS}"
    )
    questions = [f"{number} " * PROMPT_WORDS for number in range(BURST)]

    async with running_mesh(tmp_path, *argv) as mesh:

        async def answer(question: str) -> object:
            found = await chat(mesh.url, question, max_tokens=4, temperature=0, ignore_eos=True)
            return found["choices"][0]["message"]["content"]  # type: ignore[index]

        late = 'kvmesh_router_queue_requests{priority="late"}'

        async def has_late() -> bool:
            # No request is late before the planner has sent its target, so the caller repeats the burst.
            burst = [asyncio.create_task(answer(f"{turn} {question}")) for question in questions]
            seen = False
            while not all(task.done() for task in burst):
                seen = seen or await router_metric(mesh, late) > 0
                await asyncio.sleep(0.05)
            answers[:] = [await task for task in burst]
            return seen

        answers: list[object] = []
        turn = 0
        while not await has_late():
            turn += 1
            assert turn < 10, mesh.logs()
        assert [await answer(f"{turn} {question}") for question in questions] == answers
        assert await router_metric(mesh, late) == 0
