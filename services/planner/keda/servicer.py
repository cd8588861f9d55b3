"""KEDA's ExternalScaler: the sizes that the planner wants, for autoscalers of Kubernetes."""

from collections.abc import AsyncIterator
from typing import Any

from grpc.aio import Server, ServicerContext

from kvmesh.api.externalscaler import externalscaler_pb2 as pb
from kvmesh.api.externalscaler import externalscaler_pb2_grpc
from kvmesh.core import Role
from kvmesh.core.planning import PlanReport
from kvmesh.errors import InvalidRequestError, NotFoundError, UnavailableError
from services.planner.planner import Planner

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExternalScaler"].full_name
ROLES = (Role.PREFILL, Role.DECODE)


class ExternalScalerServicer(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Serves the wanted sizes of a planner's newest plan."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def add_to(self, server: Server) -> None:
        """Adds the service to a server that is not started yet."""
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(self, server)

    async def IsActive(self, request: pb.ScaledObjectRef, context: ServicerContext[Any, Any]) -> pb.IsActiveResponse:
        """Answers from the newest plan."""
        return pb.IsActiveResponse(result=wanted_workers(self._planner.newest, *pool_of(request)) > 0)

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """Sends the first answer once there is a plan for the pool."""
        model, role = pool_of(request)
        sent: bool | None = None
        seen: PlanReport | None = None
        while not self._planner.has_stopped:
            seen = await self._planner.wait_plan(after=seen)
            try:
                is_active = wanted_workers(seen, model, role) > 0
            except UnavailableError:
                continue
            if is_active is not sent:
                sent = is_active
                yield pb.IsActiveResponse(result=is_active)
        raise UnavailableError("the planner is stopping", reason="planner_stopping")

    async def GetMetricSpec(
        self, request: pb.ScaledObjectRef, context: ServicerContext[Any, Any]
    ) -> pb.GetMetricSpecResponse:
        """Returns one metric, whose target per replica is 1 worker."""
        name = metric_name(*pool_of(request))
        return pb.GetMetricSpecResponse(metricSpecs=[pb.MetricSpec(metricName=name, targetSize=1, targetSizeFloat=1.0)])

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: ServicerContext[Any, Any]
    ) -> pb.GetMetricsResponse:
        """Returns the number of wanted workers. NotFoundError for another metric than GetMetricSpec names."""
        pool = pool_of(request.scaledObjectRef)
        # KEDA asks with a prefix of its own, such as `s0-`, from some versions on.
        if request.metricName and not request.metricName.endswith(metric_name(*pool)):
            raise NotFoundError(
                f"the metric of this pool is {metric_name(*pool)}", reason="metric_not_found", field="metricName"
            )
        workers = wanted_workers(self._planner.newest, *pool)
        value = pb.MetricValue(
            metricName=request.metricName or metric_name(*pool), metricValue=workers, metricValueFloat=float(workers)
        )
        return pb.GetMetricsResponse(metricValues=[value])


def pool_of(reference: pb.ScaledObjectRef) -> tuple[str, Role]:
    """Returns the pool of a trigger's metadata. Raises InvalidRequestError that names what is missing or wrong."""
    metadata = reference.scalerMetadata
    model, role = metadata.get("model", ""), metadata.get("role", "")
    if not model:
        raise InvalidRequestError("the trigger's metadata lacks the served model name", field="scalerMetadata.model")
    if role not in ROLES:
        raise InvalidRequestError("the trigger's role must be prefill or decode", field="scalerMetadata.role")
    return model, Role(role)


def metric_name(model: str, role: Role) -> str:
    """Metric names of Kubernetes have no capital letters and few signs."""
    words = "".join(sign if sign.isalnum() else "-" for sign in model.lower())
    return f"kvmesh-{words}-{role.value}-workers"


def wanted_workers(plan: PlanReport, model: str, role: Role) -> int:
    """Returns the newest wanted size. Raises UnavailableError while the planner does not size the pool."""
    for decision in plan.decisions:
        if decision.model == model:
            return decision.shape.workers(role)
    raise UnavailableError(f"the planner has no plan for the {role.value} pool of {model}", reason="no_plan")
