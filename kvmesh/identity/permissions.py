"""Which roles may call which gRPC method of the mesh's services. A method that is not listed is refused.

Frontends' public API is not in the table: API keys protect it (docs/use/access.md).
"""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from kvmesh.identity.roles import MeshRole

_FRONTEND, _ROUTER, _OPERATOR = MeshRole.FRONTEND, MeshRole.ROUTER, MeshRole.OPERATOR
_PLANNER = MeshRole.PLANNER
_WORKERS = (MeshRole.PREFILL, MeshRole.DECODE)
_EVERYONE = frozenset(MeshRole)
PERMISSIONS: Mapping[str, Collection[MeshRole]] = {
    "/kvmesh.router.v1.RouterService/Route": {_FRONTEND},
    "/kvmesh.router.v1.RouterService/SyncPeers": {_ROUTER},
    "/kvmesh.router.v1.RouterService/RecordRequests": {_OPERATOR},
    # Frontends read what /ui shows. It contains no prompts or answers.
    "/kvmesh.router.v1.RouterService/Explain": {_FRONTEND, _OPERATOR},
    "/kvmesh.router.v1.RouterService/ListRequests": {_FRONTEND, _OPERATOR},
    "/kvmesh.router.v1.RouterService/ListWorkers": {_FRONTEND, _PLANNER, _OPERATOR},
    "/kvmesh.router.v1.RouterService/SetPlacementBounds": {_PLANNER, _OPERATOR},
    "/kvmesh.worker.v1.WorkerService/Describe": {_FRONTEND, _ROUTER, _PLANNER, _OPERATOR},
    "/kvmesh.worker.v1.WorkerService/WatchKv": {_ROUTER},
    "/kvmesh.worker.v1.WorkerService/WatchLoad": {_ROUTER, _OPERATOR},
    "/kvmesh.worker.v1.WorkerService/FetchModelFiles": {_FRONTEND},
    "/kvmesh.worker.v1.WorkerService/ListKvPaths": {_OPERATOR},
    # A prefill worker has a decode worker check the path from it before it registers.
    "/kvmesh.worker.v1.WorkerService/CheckKvPath": {*_WORKERS, _OPERATOR},
    "/kvmesh.worker.v1.WorkerService/LoadAdapter": {_OPERATOR},
    "/kvmesh.worker.v1.WorkerService/UnloadAdapter": {_OPERATOR},
    "/kvmesh.worker.v1.WorkerService/Drain": {_PLANNER, _OPERATOR},
    "/kvmesh.worker.v1.WorkerService/SetRole": {_PLANNER, _OPERATOR},
    "/kvmesh.worker.v1.WorkerService/ResetCache": {_OPERATOR},
    "/kvmesh.worker.v1.WorkerService/Sleep": {_OPERATOR},
    "/kvmesh.worker.v1.WorkerService/Wake": {_OPERATOR},
    # A decode worker has prefill workers compute a short prompt to check the KV path to them. Its certificate may say prefill, since
    # workers change their role while they run.
    "/kvmesh.prefill.v1.PrefillService/Attach": {_FRONTEND},
    "/kvmesh.prefill.v1.PrefillService/Generate": {*_WORKERS, _OPERATOR},
    "/kvmesh.prefill.v1.PrefillService/ReleaseKv": {*_WORKERS, _OPERATOR},
    "/kvmesh.decode.v1.DecodeService/Attach": {_FRONTEND},
    "/kvmesh.decode.v1.DecodeService/Generate": {_OPERATOR},
    "/kvmesh.decode.v1.DecodeService/ReleaseKv": {_OPERATOR},
    "/kvmesh.planner.v1.PlannerService/GetPlan": {_FRONTEND, _OPERATOR},
    "/kvmesh.planner.v1.PlannerService/WatchPlans": {MeshRole.SCALER, _OPERATOR},
    "/kvmesh.planner.v1.PlannerService/SetTargets": {_OPERATOR},
    "/kvmesh.planner.v1.PlannerService/Simulate": {_OPERATOR},
    "/kvmesh.planner.v1.ScalerService/Scale": {_PLANNER, _OPERATOR},
    "/kvmesh.planner.v1.ScalerService/ListPools": {_PLANNER, _OPERATOR},
    # KEDA calls the planner with an operator's certificate, or one of the role scaler, which can read nothing else.
    "/externalscaler.ExternalScaler/IsActive": {MeshRole.SCALER, _OPERATOR},
    "/externalscaler.ExternalScaler/StreamIsActive": {MeshRole.SCALER, _OPERATOR},
    "/externalscaler.ExternalScaler/GetMetricSpec": {MeshRole.SCALER, _OPERATOR},
    "/externalscaler.ExternalScaler/GetMetrics": {MeshRole.SCALER, _OPERATOR},
    "/grpc.health.v1.Health/Check": _EVERYONE,
    "/grpc.health.v1.Health/Watch": _EVERYONE,
    "/grpc.health.v1.Health/List": {_OPERATOR},
}
OPERATOR_PREFIXES = ("/grpc.reflection.", "/grpc.channelz.")
"""Services whose methods only operators may call."""
READING = frozenset(
    {
        "Describe",
        "WatchLoad",
        "ListKvPaths",
        "ListWorkers",
        "ListRequests",
        "Explain",
        "GetPlan",
        "WatchPlans",
        "ListPools",
        "IsActive",
        "StreamIsActive",
        "GetMetricSpec",
        "GetMetrics",
        "Check",
        "Watch",
        "List",
    }
)
"""Methods that change nothing: an operator's calls of them are not written to the audit log."""
OnDenied = Callable[[Collection[MeshRole]], None]


def may_call(role: MeshRole, method: str) -> bool:
    if method.startswith(OPERATOR_PREFIXES):
        return role is MeshRole.OPERATOR
    return role in PERMISSIONS.get(method, ())


def is_audited(role: MeshRole, method: str) -> bool:
    """Returns True for an operator's call that changes something."""
    return role is MeshRole.OPERATOR and method in PERMISSIONS and method.rpartition("/")[2] not in READING


_SERVERS: Mapping[str, Collection[MeshRole]] = {
    "RouterService": (_ROUTER,),
    "WorkerService": _WORKERS,
    "PrefillService": _WORKERS,
    "DecodeService": _WORKERS,
    "PlannerService": (_PLANNER,),
    "ScalerService": (MeshRole.SCALER,),
    "ExternalScaler": (_PLANNER,),
}
"""The roles that serve each service. A worker serves those of both roles, since its role may change."""


def servers_of(method: str) -> Collection[MeshRole]:
    """Returns the roles that serve a method; empty for health, which all roles serve."""
    return _SERVERS.get(method.split("/")[1].rpartition(".")[2], ())


def callers_of(server: MeshRole) -> frozenset[MeshRole]:
    """Returns the roles that have a method to call on a server, health checks aside."""
    return frozenset(role for method, roles in PERMISSIONS.items() if server in servers_of(method) for role in roles)


class Intentions(Protocol):
    """The rules for calls of one service."""

    def allows(self, role: MeshRole) -> bool:
        """Decides by the newest rules that are known; False before the first. It must not wait."""
        ...

    def on_denied(self, callback: OnDenied) -> None:
        """From now on `callback` gets the roles that lose their permission, in the event loop of the calls."""
        ...
