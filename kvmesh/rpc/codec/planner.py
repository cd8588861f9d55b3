"""The planner's plan."""

from kvmesh.api.planner.v1 import planner_pb2 as pb
from kvmesh.core.plan import LatencyReport, PlanReport, PoolReport
from kvmesh.rpc.codec.message_codec import MessageCodec, enum_table
from kvmesh.rpc.codec.worker import ROLES

_POOL = MessageCodec(pb.PoolView, PoolReport, role=ROLES)
_LATENCY = MessageCodec(pb.LatencyView, LatencyReport)
_PLAN = MessageCodec(
    pb.GetPlanResponse, PlanReport, mode=enum_table(pb.PlannerMode, str), pools=_POOL, latencies=_LATENCY
)
to_plan, from_plan = _PLAN.encode, _PLAN.decode
