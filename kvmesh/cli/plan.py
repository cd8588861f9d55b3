"""Which processes a mesh on one machine consists of. Pure: settings in, child specifications out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.cli.children import ChildSpec
from kvmesh.cli.gpu_plan import WorkerPlaces


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """The children of one mesh. Workers load engines and take longest, so they are started first.

    Workers of one turn start at once, when those of the turn before are ready: engines that share a device must not measure
    its memory at the same time.
    """

    worker_turns: Sequence[Sequence[ChildSpec]]
    routers: Sequence[ChildSpec]
    frontends: Sequence[ChildSpec]
    planners: Sequence[ChildSpec]

    @property
    def workers(self) -> Sequence[ChildSpec]:
        return [spec for turn in self.worker_turns for spec in turn]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """What is asked for. `engine_argv` goes to every worker as it is, `role_argv` to those of a role, `router_argv` to every
    router, `frontend_argv` to the frontend. `places` are the workers' devices; later flags win over them."""

    engine: str
    model: Path
    served_name: str
    prefill: int
    decode: int
    routers: int
    host: str
    port: int
    grpc_port: int
    registry: str
    policy: str
    log_level: str
    run_dir: Path
    address: str = ""
    port_range: str = ""
    discovery_token: str = ""
    engine_argv: Sequence[str] = ()
    role_argv: Mapping[str, Sequence[str]] = field(default_factory=dict)
    places: WorkerPlaces = field(default_factory=WorkerPlaces)
    router_argv: Sequence[str] = ()
    frontend_argv: Sequence[str] = ()
    frontend_processes: int = 1
    has_gateway: bool = False
    has_planner: bool = True
    has_frontend: bool = True
    """False: the workers join a mesh that has frontends, routers and a planner."""

    @property
    def hosts_router(self) -> bool:
        """Whether frontend and router are one process."""
        return self.has_gateway and self.routers == self.frontend_processes == 1


def plan_mesh(shape: MeshShape) -> MeshPlan:
    """One specification per process. Processes pick ports that are not named themselves and register them."""
    frontend_argv = (
        *(("--http-host", shape.host) if shape.host else ()),
        *("--http-port", str(shape.port), "--rpc-port", str(shape.grpc_port)),
        # Meshes on one machine must not run each other's batches.
        *("--state-dir", str(shape.run_dir / "state")),
        *("--processes", str(shape.frontend_processes)),
        *shape.frontend_argv,
    )
    router_argv = ("--policy", shape.policy, *shape.router_argv)
    if shape.hosts_router:
        routers = []
        frontend = _service(shape, "gateway", argv=(*frontend_argv, "--", *_common(shape), *router_argv))
    else:
        routers = [_service(shape, "router", argv=router_argv, number=number) for number in range(shape.routers)]
        frontend = _service(shape, "frontend", argv=frontend_argv)
    workers = [
        *(_worker(shape, "prefill", number) for number in range(shape.prefill)),
        *(_worker(shape, "decode", number) for number in range(shape.decode)),
    ]
    turns = [shape.places.turns.get(worker.name, 0) for worker in workers]
    return MeshPlan(
        worker_turns=[
            [worker for worker, its_turn in zip(workers, turns, strict=True) if its_turn == turn]
            for turn in sorted(set(turns))
        ],
        routers=routers if shape.has_frontend else [],
        frontends=[frontend] if shape.has_frontend else [],
        planners=[_service(shape, "planner", argv=())] if shape.has_planner and shape.has_frontend else [],
    )


def _worker(shape: MeshShape, role: str, number: int) -> ChildSpec:
    argv = (
        *("--engine", shape.engine),
        *("--model", str(shape.model)),
        *(("--served-name", shape.served_name) if shape.served_name else ()),
        *shape.places.argv.get(f"{role}-{number}", ()),
        *shape.engine_argv,
        *shape.role_argv.get(role, ()),
    )
    return _service(shape, role, argv=argv, number=number, env=shape.places.env)


def _service(
    shape: MeshShape, service: str, *, argv: Sequence[str], number: int = 0, env: Mapping[str, str] | None = None
) -> ChildSpec:
    name = f"{service}-{number}"
    token = {"KVMESH_DISCOVERY_TOKEN": shape.discovery_token} if shape.discovery_token else {}
    return ChildSpec(
        name=name,
        module=f"services.{service}",
        argv=(*_common(shape), *argv),
        # Flags can be read by other users of the machine.
        env={**token, **(env or {})},
        log_path=shape.run_dir / f"{name}.log",
    )


def _common(shape: MeshShape) -> Sequence[str]:
    return (
        *("--discovery-address", shape.registry, "--telemetry-log-level", shape.log_level),
        *(("--address", shape.address) if shape.address else ()),
        *(("--port-range", shape.port_range) if shape.port_range else ()),
    )
