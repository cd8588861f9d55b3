"""Calls PlannerService."""

from typing import Any

from grpc.aio import AioRpcError

from kvmesh.api.planner.v1 import planner_pb2 as pb
from kvmesh.api.planner.v1.planner_pb2_grpc import PlannerServiceStub
from kvmesh.core.plan import PlanReport
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.codec.planner import from_plan
from kvmesh.rpc.status import from_rpc_error


class GrpcPlannerClient:
    """One planner."""

    def __init__(self, channels: ChannelPool, address: str) -> None:
        self._channels = channels
        self._address = address

    async def get_plan(self, *, model: str = "", timeout_s: float) -> PlanReport:
        stub: Any = PlannerServiceStub(self._channels.channel(self._address))
        try:
            return from_plan(await stub.GetPlan(pb.GetPlanRequest(model=model), timeout=timeout_s))
        except AioRpcError as error:
            raise from_rpc_error(error, where=self._address) from error
