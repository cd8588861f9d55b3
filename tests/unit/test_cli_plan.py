"""Tests of `kvmesh plan`: its text, its JSON and how it finds the leading planner."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvmesh.api.planner.v1 import planner_pb2 as pb
from kvmesh.api.planner.v1 import planner_pb2_grpc
from kvmesh.cli.connection import MeshConnection
from kvmesh.cli.show_plan import PlanSettings, plans_of, render_plan
from kvmesh.core import Role
from kvmesh.core.planning import (
    Alternative,
    Decision,
    DecisionAction,
    DecisionInputs,
    DecisionOutcome,
    Load,
    ObservationState,
    PlanReport,
    PoolReport,
    Shape,
    Targets,
)
from kvmesh.discovery.base import PLANNER, Registration
from kvmesh.errors import UnavailableError
from kvmesh.rpc.codec.planner import to_plan
from kvmesh.settings import load
from kvmesh.simulation.registry import MemoryAgent
from kvmesh.simulation.rpc import MemoryNetwork
from tests.patience import PATIENCE_S

TWO = Shape(prefill_workers=2, decode_workers=3)
FIVE = Shape(prefill_workers=5, decode_workers=2, deflect_tokens=512)
DECISION = Decision(
    number=7,
    model="demo",
    decided_at_s=100.0,
    action=DecisionAction.SCALE,
    reason="prefill_short",
    detail="24.00 of 24.00 requests/s within targets instead of 15.00",
    inputs=DecisionInputs(
        state=ObservationState.COMPLETE,
        observed=Load(requests_per_s=24.0, prompt_tokens=1200.0, output_tokens=200.0, hit_rate=0.25),
        predicted=Load(requests_per_s=26.0, prompt_tokens=1200.0, output_tokens=200.0, hit_rate=0.25),
        predictor="kalman",
        predictor_error=0.1,
        ready=TWO,
        wanted=TWO,
    ),
    alternatives=(
        Alternative(
            action=DecisionAction.SCALE,
            shape=FIVE,
            goodput_per_s=24.0,
            attainment=0.97,
            cost=7.0,
            ttft_s=1.5,
            itl_s=0.04,
            takes_s=60,
        ),
        Alternative(action=DecisionAction.KEEP, shape=TWO, goodput_per_s=15.0, cost=5.0, limit="prefill_capacity"),
    ),
    outcome=DecisionOutcome.ACCEPTED,
    outcome_detail="prefill 2 to 5",
)
PLAN = PlanReport(
    mode="act",
    source="prometheus",
    pools=(PoolReport(model="demo", role=Role.PREFILL, workers_ready=2, workers_planned=5, kv_usage=0.5),),
    targets=(Targets(model="demo", ttft_s=2.0, itl_s=0.05),),
    decisions=(DECISION,),
    problems=("worker prefill-1 cannot be scraped",),
    is_leader=True,
)


def test_the_text_of_a_plan():
    """`kvmesh plan` prints the decision with its reason, its load, the alternatives with goodput, cost and limit, and the outcome."""
    text = render_plan(PLAN)
    rows = [line.split() for line in text.splitlines()]
    assert ["demo", "prefill", "2", "5", "0", "0", "0", "0", "50%"] in rows
    assert "demo: scale (prefill_short): 24.00 of 24.00 requests/s within targets instead of 15.00" in text
    assert "95.00% of the requests within TTFT 2 s and ITL 50 ms" in text
    assert "24.00 requests/s of 1200 + 200 tokens, 25% cached" in text
    assert "26.00 requests/s of 1200 + 200 tokens, 25% cached by kalman, error 10%" in text
    assert [
        "scale",
        "5",
        "+",
        "2,",
        "deflect",
        "512",
        "24.00",
        "97.0%",
        "7",
        "1.500",
        "s",
        "40.0",
        "ms",
        "60",
        "s",
        "-",
    ] in rows
    assert ["keep", "2", "+", "3", "15.00", "0.0%", "5", "-", "-", "0", "s", "prefill_capacity"] in rows
    assert [
        "7",
        "demo",
        "scale",
        "5",
        "+",
        "2,",
        "deflect",
        "512",
        "prefill_short",
        "accepted",
        "prefill",
        "2",
        "to",
        "5",
    ] in rows
    assert "problem: worker prefill-1 cannot be scraped" in text


@asynccontextmanager
async def mesh_of(plans: dict[str, PlanReport]) -> AsyncIterator[MeshConnection]:
    """Runs one planner per plan, and yields a connection to their mesh."""

    class Servicer(planner_pb2_grpc.PlannerServiceServicer):
        def __init__(self, plan: PlanReport) -> None:
            self.plan = plan

        async def GetPlan(self, request: Any, context: Any) -> pb.GetPlanResponse:
            return pb.GetPlanResponse(plan=to_plan(self.plan))

        async def WatchPlans(self, request: Any, context: Any) -> AsyncIterator[pb.WatchPlansResponse]:
            for _ in range(3):
                yield pb.WatchPlansResponse(plan=to_plan(self.plan))

    agent, network = MemoryAgent(), MemoryNetwork()
    registry, channels = agent.registry(), network.pool()
    servers = []
    for port, (name, plan) in enumerate(plans.items(), start=1):
        await registry.register(Registration(service=PLANNER, instance_id=name, host=name, port=port, ttl_s=PATIENCE_S))
        await registry.heartbeat(name)
        server: Any = network.server(f"{name}:{port}", ())
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(Servicer(plan), server)
        await server.start()
        servers.append(server)
    try:
        yield MeshConnection(registry=registry, channels=channels)
    finally:
        await channels.aclose()
        for server in servers:
            await server.stop(None)


async def test_the_leaders_plan_is_shown():
    """A planner that does not lead names the leader, whose plan is shown. The JSON has all fields."""
    other = PlanReport(mode="act", source="scrape", leader_id="b")
    async with mesh_of({"a": other, "b": PLAN}) as connection:
        [plan] = [each async for each in plans_of(connection, PlanSettings())]
        assert plan.decisions[0].number == 7
        assert len([each async for each in plans_of(connection, PlanSettings(watch=True))]) == 3
    assert json.loads(msgspec.json.encode(plan))["decisions"][0]["alternatives"][1]["limit"] == "prefill_capacity"


def test_settings_load():
    """The flags in the documentation are valid."""
    settings = load(
        PlanSettings, argv=["--watch", "--json", "--model", "m"], environ={}, program="kvmesh plan", description=""
    )
    assert (settings.watch, settings.json, settings.model) == (True, True, "m")


async def test_a_mesh_without_a_planner():
    """If the registry lists no planner, the message names the flag that starts one."""
    async with mesh_of({}) as connection:
        with pytest.raises(UnavailableError, match="--plan"):
            await anext(plans_of(connection, PlanSettings()))
