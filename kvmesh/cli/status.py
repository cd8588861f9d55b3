"""`kvmesh status`: the mesh as tables, from the registry and the services themselves."""

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence

from kvmesh.cli.connection import CALL_TIMEOUT_S, MeshChoice, MeshTarget, connect, run_command
from kvmesh.cli.output import Row, render_table
from kvmesh.cli.state import running_meshes
from kvmesh.core import KvTier, LoadRecord, WorkerView
from kvmesh.core.planning import PlanReport
from kvmesh.discovery.base import PLANNER, ROUTER, SERVICES, Instance, Registry
from kvmesh.rpc.planner_client import GrpcPlannerClient

ROUTERS_MAX = 16
"""Routers that are asked for warnings: each knows the paths of its own frontends."""
MESH_COLUMNS = ("MESH", "URL", "REGISTRY", "PID", "LOGS")
SERVICE_COLUMNS = ("SERVICE", "ID", "ADDRESS", "STATE", "MODEL", "ENGINE", "NOTE")
WORKER_COLUMNS = (
    "WORKER",
    "RUNNING",
    "WAITING",
    "HANDOFF",
    "KV USED",
    "KV LEASED",
    "INDEX",
    "TRUST",
    "IN FLIGHT",
    "BREAKER",
    "STATE",
)
LATENCY_COLUMNS = ("MODEL", "REQ/S", "TTFT MEAN", "TTFT P99", "ITL MEAN", "ITL P99")
ADVICE: Mapping[str, str] = {
    "loopback_address": "it is handed out with a loopback address; start both with --address",
    "unreachable": "its KV address does not answer; check --address of both, and that the firewall lets the KV ports pass",
    "timed_out": "the transfer does not end in time; check the network between both hosts",
    "incompatible": "the two cannot exchange KV; start both with the same model, engine and KV settings",
    "failed": "the log of {decode} has the cause",
}
"""What to do, by `FailingKvPath.reason`."""


def service_row(instance: Instance) -> Row:
    state = "draining" if instance.is_draining else instance.health.value
    return (
        instance.service.removeprefix("kvmesh-"),
        instance.instance_id,
        instance.address,
        state,
        instance.meta.get("model", ""),
        instance.meta.get("engine", ""),
        instance.notes[:60] if state != "passing" else "",
    )


def worker_row(view: WorkerView) -> Row:
    """Returns one worker as the router sees it."""
    told = view.load
    load = ("-",) * 5
    if told is not None:
        load = (
            str(told.running_requests),
            str(told.waiting_requests),
            handoff_text(told),
            f"{told.kv_blocks_used}/{told.kv_blocks_total}",
            str(told.kv_blocks_leased),
        )
    return (
        view.worker.worker_id,
        *load,
        index_text(view),
        f"{view.trust} ({view.trust_reason})" if view.trust_reason else view.trust,
        str(view.requests_in_flight),
        view.breaker or "-",
        view.excluded_by or ("paths lost" if view.paused_frontend_ids else "ok"),
    )


def handoff_text(load: LoadRecord) -> str:
    """Returns the queues of a rendezvous handoff that hold requests."""
    queues = ("bootstrapping", "sending", "preallocating", "receiving", "retracted")
    found = [f"{name} {count}" for name in queues if (count := getattr(load, f"{name}_requests"))]
    return ", ".join(found) or "-"


def index_text(view: WorkerView) -> str:
    """Returns the blocks in the index; tiers other than the device's are named."""
    others = [f"{tier.value} {blocks}" for tier, blocks in view.blocks_by_tier.items() if tier is not KvTier.DEVICE]
    return ", ".join([str(view.index_blocks), *others])


def latency_rows(plan: PlanReport) -> list[Row]:
    """Returns one row per model that clients asked for."""
    return [
        (
            latency.model,
            _number(latency.requests_per_s),
            _milliseconds(latency.ttft_mean_s),
            _milliseconds(latency.ttft_p99_s),
            _milliseconds(latency.itl_mean_s),
            _milliseconds(latency.itl_p99_s),
        )
        for latency in plan.latencies
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.1f} ms"


async def _instances(registry: Registry) -> Mapping[str, Sequence[Instance]]:
    views = await asyncio.gather(*(registry.instances(service) for service in SERVICES))
    return {view.service: view.instances for view in views}


async def _print_tables(target: MeshTarget) -> None:
    async with connect(target) as connection:
        instances = await _instances(connection.registry)
        rows = [service_row(instance) for service in SERVICES for instance in instances[service]]
        print(render_table(SERVICE_COLUMNS, rows))
        seen = await asyncio.gather(*(connection.list_workers(router) for router in instances[ROUTER][:ROUTERS_MAX]))
        for views in seen[:1]:
            print("\n" + render_table(WORKER_COLUMNS, [worker_row(view) for view in views]))
        for warning in path_warnings(view for views in seen for view in views):
            print(f"warning: {warning}")
        for planner in instances[PLANNER][:1]:
            plan = await GrpcPlannerClient(connection.channels, planner.address).get_plan(timeout_s=CALL_TIMEOUT_S)
            print("\n" + render_table(LATENCY_COLUMNS, latency_rows(plan)))
            for problem in plan.problems:
                print(f"planner: {problem}")


def main(argv: Sequence[str]) -> int:
    return run_command(MeshChoice, argv, _show, program="kvmesh status", description=__doc__)


def _show(settings: MeshChoice) -> int:
    meshes = running_meshes()
    if not settings.consul and not settings.mesh and len(meshes) > 1:
        rows = [(mesh.name, mesh.url or "starting", mesh.registry, str(mesh.pid), mesh.run_dir) for mesh in meshes]
        print(render_table(MESH_COLUMNS, rows))
        print("kvmesh: choose one with --mesh NAME", file=sys.stderr)
        return 0
    asyncio.run(_print_tables(settings.target()))
    return 0


def path_warnings(views: Iterable[WorkerView]) -> list[str]:
    """Returns one line per failing pair and per lost path, each once; `views` may come from several routers."""
    warnings: dict[str, None] = {}
    for view in views:
        decode = view.worker.worker_id
        for path in view.load.failing_kv_paths if view.load is not None else ():
            advice = ADVICE.get(path.reason, ADVICE["failed"]).format(decode=decode)
            warnings[f"{decode} cannot pull KV from {path.worker_id}: {path.reason}; {advice}"] = None
        for frontend_id in view.paused_frontend_ids:
            warnings[
                f"{frontend_id} has lost its connection to {decode}, and its requests go to other workers;"
                " check the network between both hosts"
            ] = None
    return list(warnings)
