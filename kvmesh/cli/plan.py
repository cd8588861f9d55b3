"""Plans the processes of a mesh on one machine. Pure: converts settings to child specifications."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.cli.children import ChildSpec
from kvmesh.cli.gpu_plan import WorkerPlaces
from kvmesh.cli.up_settings import UpSettings, worker_groups
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
class MeshInputs:
    """The settings of `kvmesh up`, and what it learns at the start. Flags of the settings override those of `places`."""

    settings: UpSettings
    registry: str
    """Address of the registry."""
    places: WorkerPlaces = field(default_factory=WorkerPlaces)
    credentials: Credentials | None = None
    scaler_address: str = ""
    """Where the planner has workers started and stopped. Empty: it only observes."""


def plan_mesh(inputs: MeshInputs) -> MeshPlan:
    """Returns one specification per process. A process without a port in its flags chooses one and registers it."""
    settings = inputs.settings
    frontend_argv = (
        *(("--http-host", settings.host) if settings.host else ()),
        *("--http-port", str(settings.port), "--rpc-port", str(settings.grpc_port)),
        # Meshes on one machine must not run each other's batches, so each has its own folder for them.
        *("--state-dir", str(settings.run_path / "state")),
        *("--processes", str(settings.frontend_processes)),
        *shlex.split(settings.frontend_args),
    )
    router_argv = ("--policy", settings.policy, *shlex.split(settings.router_args))
    # One gateway process is both frontend and router.
    if settings.gateway and settings.routers == settings.frontend_processes == 1:
        routers = []
        frontend = _service(inputs, "gateway", argv=(*frontend_argv, "--", *_common(inputs), *router_argv))
    else:
        routers = [_service(inputs, "router", argv=router_argv, number=number) for number in range(settings.routers)]
        frontend = _service(inputs, "frontend", argv=frontend_argv)
    workers = [
        *(worker_spec(inputs, "prefill", number) for number in range(settings.prefill)),
        *(worker_spec(inputs, "decode", number) for number in range(settings.decode)),
    ]
    turns = [inputs.places.turns.get(worker.name, 0) for worker in workers]
    # Workers that join a mesh use its frontends, routers and planner.
    has_frontend = not settings.join
    has_planner = has_frontend and (settings.planner or settings.plan)
    return MeshPlan(
        worker_turns=[
            [worker for worker, its_turn in zip(workers, turns, strict=True) if its_turn == turn]
            for turn in sorted(set(turns))
        ],
        routers=routers if has_frontend else [],
        frontends=[frontend] if has_frontend else [],
        planners=[_service(inputs, "planner", argv=_planner_argv(inputs))] if has_planner else [],
    )


def _planner_argv(inputs: MeshInputs) -> Sequence[str]:
    acting = ("--mode", "act", "--scaler-address", inputs.scaler_address) if inputs.scaler_address else ()
    return (*acting, *shlex.split(inputs.settings.planner_args))


def worker_spec(inputs: MeshInputs, role: str, number: int) -> ChildSpec:
    """Returns the specification of one worker."""
    settings = inputs.settings
    # A planner may start prefill workers later.
    has_prefill = settings.prefill or settings.plan
    argv = (
        *("--engine", settings.registration.name),
        *("--model", str(settings.model_path)),
        *(("--served-name", settings.served_name) if settings.served_name else ()),
        *inputs.places.argv.get(f"{role}-{number}", ()),
        *(() if has_prefill else settings.registration.flags_without_prefill),
        *shlex.split(settings.engine_args),
        *_role_argv(settings, role),
    )
    return _service(inputs, role, argv=argv, number=number, env=inputs.places.env)


def _role_argv(settings: UpSettings, role: str) -> Sequence[str]:
    (ranks,) = (group.devices for group in worker_groups(settings) if group.role == role)
    given = settings.prefill_args if role == "prefill" else settings.decode_args
    gpu = settings.registration.gpu
    ranks_argv = (gpu.ranks_flag, str(ranks)) if gpu is not None and ranks > 1 else ()
    return (*ranks_argv, *shlex.split(given))


def _service(
    inputs: MeshInputs, service: str, *, argv: Sequence[str], number: int = 0, env: Mapping[str, str] | None = None
) -> ChildSpec:
    name = f"{service}-{number}"
    return ChildSpec(
        name=name,
        module=f"services.{service}",
        argv=(*_common(inputs), *argv),
        env=env or {},
        log_path=inputs.settings.run_path / f"{name}.log",
    )


def _common(inputs: MeshInputs) -> Sequence[str]:
    settings = inputs.settings
    return (
        *("--discovery-address", inputs.registry, "--telemetry-log-level", settings.log_level),
        *(("--address", settings.address) if settings.address else ()),
        *(("--port-range", settings.port_range) if settings.port_range else ()),
        *(("--insecure-listen",) if settings.insecure_listen else ()),
        *(inputs.credentials.argv if inputs.credentials is not None else ()),
        # The embedded registry checks services over mesh TLS.
        *(() if settings.consul else ("--discovery-checks-tls",)),
    )
