"""Calls PlannerService."""

from collections.abc import AsyncGenerator
from typing import Any

from grpc.aio import AioRpcError

from kvmesh.api.planner.v1 import planner_pb2 as pb
from kvmesh.api.planner.v1.planner_pb2_grpc import PlannerServiceStub
from kvmesh.core.planning import PlanReport, Targets
from kvmesh.core.whatif import SimulationOutcome, SimulationRequest
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.codec.planner import from_plan, from_targets, to_targets
from kvmesh.rpc.codec.whatif import from_simulation_outcome, to_simulation_request
from kvmesh.rpc.status import from_rpc_error


class GrpcPlannerClient:
    """One planner. Calls raise MeshError."""

    def __init__(self, channels: ChannelPool, address: str) -> None:
        self._channels = channels
        self._address = address

    async def get_plan(self, *, model: str = "", timeout_s: float) -> PlanReport:
        try:
            response = await self._stub().GetPlan(pb.GetPlanRequest(model=model), timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        return from_plan(response.plan)

    async def watch_plans(self, *, model: str = "", timeout_s: float | None = None) -> AsyncGenerator[PlanReport, None]:
        """Yields the newest plan and every new one. Closing the generator ends the call. `timeout_s` None: no deadline."""
        call = self._stub().WatchPlans(pb.WatchPlansRequest(model=model), timeout=timeout_s)
        try:
            async for response in call:
                yield from_plan(response.plan)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        finally:
            call.cancel()

    async def set_targets(self, targets: Targets, *, timeout_s: float) -> Targets:
        """Returns the targets that are now in force."""
        try:
            request = pb.SetTargetsRequest(targets=to_targets(targets))
            response = await self._stub().SetTargets(request, timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        return from_targets(response.targets)

    async def simulate(self, request: SimulationRequest, *, timeout_s: float) -> SimulationOutcome:
        try:
            response = await self._stub().Simulate(to_simulation_request(request), timeout=timeout_s)
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
        return from_simulation_outcome(response)

    def _stub(self) -> Any:
        return PlannerServiceStub(self._channels.channel(self._address, MeshRole.PLANNER))
