"""ScalerService of `kvmesh up`: protobuf to the scaler and back."""

from typing import Any

from grpc.aio import Server, ServicerContext

from kvmesh.api.planner.v1 import scaler_pb2 as pb
from kvmesh.api.planner.v1 import scaler_pb2_grpc
from kvmesh.cli.scaler import LocalScaler
from kvmesh.errors import UnavailableError
from kvmesh.rpc.codec.scaler import from_scale_request, to_pools

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ScalerService"].full_name


class ScalerServicer(scaler_pb2_grpc.ScalerServiceServicer):
    """Listens before the mesh is ready, since its planner is one of the processes that are started; `scaler` is set then."""

    def __init__(self) -> None:
        self.scaler: LocalScaler | None = None

    def add_to(self, server: Server) -> None:
        scaler_pb2_grpc.add_ScalerServiceServicer_to_server(self, server)

    async def Scale(self, request: pb.ScaleRequest, context: ServicerContext[Any, Any]) -> pb.ScaleResponse:
        """Sets the wanted size of a pool."""
        target = from_scale_request(request)
        return pb.ScaleResponse(workers=await self._ready().scale(target, fencing_token=request.fencing_token))

    async def ListPools(self, request: pb.ListPoolsRequest, context: ServicerContext[Any, Any]) -> pb.ListPoolsResponse:
        """Both pools."""
        return to_pools(await self._ready().pools())

    def _ready(self) -> LocalScaler:
        if self.scaler is None:
            raise UnavailableError("the mesh is starting", reason="starting", retry_after_s=1.0)
        return self.scaler
