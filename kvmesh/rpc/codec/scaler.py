"""ScalerService: pools and targets to protobuf and back."""

from collections.abc import Sequence

from kvmesh.api.planner.v1 import scaler_pb2 as pb
from kvmesh.checks import check_length
from kvmesh.core.planning import PoolState, PoolTarget
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.scalars import known_enum, optional_duration, optional_field, required_text, to_duration
from kvmesh.rpc.codec.worker import ROLE_NUMBERS, ROLES

WORKERS_MAX = 100_000
IDS_MAX = 10_000


def to_scale_request(target: PoolTarget, fencing_token: int) -> pb.ScaleRequest:
    request = pb.ScaleRequest(
        model=target.model,
        role=ROLE_NUMBERS[target.role],
        workers=target.workers,
        drain_worker_ids=target.drain_worker_ids,
        fencing_token=fencing_token,
    )
    if target.drain_timeout_s is not None:
        request.drain_timeout.CopyFrom(to_duration(target.drain_timeout_s))
    return request


def from_scale_request(request: pb.ScaleRequest) -> PoolTarget:
    """Raises InvalidRequestError with the field's name."""
    if request.workers > WORKERS_MAX:
        raise InvalidRequestError(f"workers must be at most {WORKERS_MAX}", field="workers")
    check_length(len(request.drain_worker_ids), "drain_worker_ids", high=IDS_MAX)
    drain_timeout_s = optional_duration(request, "drain_timeout")
    if drain_timeout_s is not None and not 0 <= drain_timeout_s <= 3600:
        raise InvalidRequestError("drain_timeout must be 0 s to 1 h", field="drain_timeout")
    return PoolTarget(
        model=required_text(request.model, field="model", characters_max=256),
        role=known_enum(request.role, ROLES, "role"),
        workers=request.workers,
        drain_worker_ids=tuple(request.drain_worker_ids),
        drain_timeout_s=drain_timeout_s,
    )


def to_pools(pools: Sequence[PoolState]) -> pb.ListPoolsResponse:
    return pb.ListPoolsResponse(
        pools=[
            pb.Pool(
                model=pool.model,
                role=ROLE_NUMBERS[pool.role],
                workers_running=pool.workers_running,
                workers_wanted=pool.workers_wanted,
                workers_max=pool.workers_max,
                ready_worker_ids=pool.ready_worker_ids,
            )
            for pool in pools
        ]
    )


def from_pools(response: pb.ListPoolsResponse) -> Sequence[PoolState]:
    """Raises InvalidRequestError with the field's name."""
    return [
        PoolState(
            model=required_text(pool.model, field="pools.model", characters_max=256),
            role=known_enum(pool.role, ROLES, "pools.role"),
            workers_wanted=pool.workers_wanted,
            workers_running=pool.workers_running,
            ready_worker_ids=tuple(pool.ready_worker_ids),
            workers_max=optional_field(pool, "workers_max"),
        )
        for pool in response.pools
    ]
