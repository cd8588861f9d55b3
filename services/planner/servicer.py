"""PlannerService: converts plans, targets and simulations to and from protobuf."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from grpc.aio import Server, ServicerContext

from kvmesh.api.planner.v1 import planner_pb2 as pb
from kvmesh.api.planner.v1 import planner_pb2_grpc
from kvmesh.core.planning import PlanReport
from kvmesh.errors import InvalidRequestError, UnavailableError
from kvmesh.rpc.codec.planner import from_targets, to_plan, to_targets
from kvmesh.rpc.codec.whatif import from_simulation_request, to_simulation_outcome
from services.planner.planner import Planner
from services.planner.simulations import SimulationRunner

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PlannerService"].full_name


class PlannerServicer(planner_pb2_grpc.PlannerServiceServicer):
    """Serves the plans of a planner."""

    def __init__(self, planner: Planner, simulations: SimulationRunner | None = None) -> None:
        self._planner = planner
        self._simulations = simulations or SimulationRunner()

    def add_to(self, server: Server) -> None:
        """Adds the service to a server that is not started yet."""
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(self, server)

    async def GetPlan(self, request: pb.GetPlanRequest, context: ServicerContext[Any, Any]) -> pb.GetPlanResponse:
        """Returns the newest plan, of one model or all."""
        return pb.GetPlanResponse(plan=to_plan(select_model(self._planner.newest, request.model)))

    async def WatchPlans(
        self, request: pb.WatchPlansRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchPlansResponse]:
        """Sends the newest plan and every later one that is the newest when the reader is ready."""
        seen: PlanReport | None = None
        while not self._planner.has_stopped:
            plan = await self._planner.wait_plan(after=seen)
            if plan is not seen:
                seen = plan
                yield pb.WatchPlansResponse(plan=to_plan(select_model(plan, request.model)))
        raise UnavailableError("the planner is stopping", reason="planner_stopping")

    async def SetTargets(
        self, request: pb.SetTargetsRequest, context: ServicerContext[Any, Any]
    ) -> pb.SetTargetsResponse:
        """Replaces the targets of a model."""
        if not request.HasField("targets"):
            raise InvalidRequestError("targets is required", field="targets")
        targets = from_targets(request.targets)
        self._planner.set_targets(targets)
        return pb.SetTargetsResponse(targets=to_targets(targets))

    async def Simulate(self, request: pb.SimulateRequest, context: ServicerContext[Any, Any]) -> pb.SimulateResponse:
        """Simulates with the model's targets and speed where the request has none."""
        asked = from_simulation_request(request)
        outcome = await self._simulations.run(self._planner.complete(asked), timeout_s=context.time_remaining())
        return to_simulation_outcome(outcome)


def select_model(plan: PlanReport, model: str) -> PlanReport:
    """Returns the plan's part for one model; the whole plan for an empty name."""
    return replace(
        plan,
        pools=[pool for pool in plan.pools if model in ("", pool.model)],
        latencies=[latency for latency in plan.latencies if model in ("", latency.model)],
        targets=[targets for targets in plan.targets if model in ("", targets.model)],
        decisions=[decision for decision in plan.decisions if model in ("", decision.model)],
    )
