"""Plans the processes of a mesh on one machine. Pure: converts settings to child specifications."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.cli.children import ChildSpec
from kvmesh.cli.gpu_plan import WorkerPlaces
from kvmesh.identity.credentials import Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """The children of one mesh. Workers load engines, which takes longest, so they start first.

    The workers of one group of `worker_turns` start together, after those of the group before are ready: engines that share a
    device must not measure its memory at the same time.
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
    """The requested processes and their flags. `engine_argv` goes to every worker, `role_argv` to the workers of one role,
    `router_argv` to every router, `frontend_argv` to the frontend. `places` are the workers' devices; later flags override
    them."""

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
    insecure_listen: bool = False
    credentials: Credentials | None = None
    checks_tls: bool = False
    """The registry's agent checks services over mesh TLS."""
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
    planner_argv: Sequence[str] = ()
    scaler_address: str = ""
    """Where the planner has workers started and stopped. Empty: it only observes."""

    @property
    def hosts_router(self) -> bool:
        """True if one gateway process is both frontend and router."""
        return self.has_gateway and self.routers == self.frontend_processes == 1


def plan_mesh(shape: MeshShape) -> MeshPlan:
    """Returns one specification per process. A process without a port in its flags chooses one and registers it."""
    frontend_argv = (
        *(("--http-host", shape.host) if shape.host else ()),
        *("--http-port", str(shape.port), "--rpc-port", str(shape.grpc_port)),
        # Meshes on one machine must not run each other's batches, so each has its own folder for them.
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
        *(worker_spec(shape, "prefill", number) for number in range(shape.prefill)),
        *(worker_spec(shape, "decode", number) for number in range(shape.decode)),
    ]
    turns = [shape.places.turns.get(worker.name, 0) for worker in workers]
    has_planner = shape.has_planner and shape.has_frontend
    return MeshPlan(
        worker_turns=[
            [worker for worker, its_turn in zip(workers, turns, strict=True) if its_turn == turn]
            for turn in sorted(set(turns))
        ],
        routers=routers if shape.has_frontend else [],
        frontends=[frontend] if shape.has_frontend else [],
        planners=[_service(shape, "planner", argv=planner_argv(shape))] if has_planner else [],
    )


def planner_argv(shape: MeshShape) -> Sequence[str]:
    acting = ("--mode", "act", "--scaler-address", shape.scaler_address) if shape.scaler_address else ()
    return (*acting, *shape.planner_argv)


def worker_spec(shape: MeshShape, role: str, number: int) -> ChildSpec:
    """Returns the specification of one worker."""
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
    return ChildSpec(
        name=name,
        module=f"services.{service}",
        argv=(*_common(shape), *argv),
        env=env or {},
        log_path=shape.run_dir / f"{name}.log",
    )


def _common(shape: MeshShape) -> Sequence[str]:
    return (
        *("--discovery-address", shape.registry, "--telemetry-log-level", shape.log_level),
        *(("--address", shape.address) if shape.address else ()),
        *(("--port-range", shape.port_range) if shape.port_range else ()),
        *(("--insecure-listen",) if shape.insecure_listen else ()),
        *(shape.credentials.argv if shape.credentials is not None else ()),
        *(("--discovery-checks-tls",) if shape.checks_tls else ()),
    )
