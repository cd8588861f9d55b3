"""`kvmesh status`: the mesh as tables, from the registry and the services themselves."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.cli.state import find_mesh, running_meshes
from kvmesh.cli.tables import Row, render_table
from kvmesh.core import KvTier
from kvmesh.discovery.base import PLANNER, ROUTER, SERVICES, Instance, Registry
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import MeshError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.codec.planner import PlanReport
from kvmesh.rpc.planner_client import GrpcPlannerClient
from kvmesh.rpc.router.client import GrpcRouterClient, WorkerView
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import SettingsError, load, setting

CALL_TIMEOUT_S = 2.0
MESH_COLUMNS = ("MESH", "URL", "REGISTRY", "PID", "LOGS")
SERVICE_COLUMNS = ("SERVICE", "ID", "ADDRESS", "STATE", "MODEL", "ENGINE", "NOTE")
WORKER_COLUMNS = (
    "WORKER",
    "RUNNING",
    "WAITING",
    "KV USED",
    "KV LEASED",
    "INDEX",
    "TRUST",
    "IN FLIGHT",
    "BREAKER",
    "STATE",
)
LATENCY_COLUMNS = ("MODEL", "REQ/S", "TTFT MEAN", "TTFT P99", "ITL MEAN", "ITL P99")


@dataclass(frozen=True, kw_only=True)
class StatusSettings:
    """Which mesh to show."""

    mesh: str = setting("", "name of a mesh that `kvmesh up` runs here; needed where there are several")
    consul: str = setting("", "address of the Consul agent; empty: the mesh that `kvmesh up` started here")
    token: str = setting("", "Consul ACL token", secret=True)


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
    """One worker as the router sees it."""
    told = view.load
    load = ("-",) * 4
    if told is not None:
        load = (
            str(told.running_requests),
            str(told.waiting_requests),
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
        view.excluded_by or "ok",
    )


def index_text(view: WorkerView) -> str:
    """Blocks in the index; tiers other than the device's are named."""
    others = [f"{tier.value} {blocks}" for tier, blocks in view.blocks_by_tier.items() if tier is not KvTier.DEVICE]
    return ", ".join([str(view.index_blocks), *others])


def latency_rows(plan: PlanReport) -> list[Row]:
    """One row per model that clients asked for."""
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


async def _show(settings: StatusSettings, address: str) -> int:
    registry = ConsulRegistry(DiscoverySettings(address=address, token=settings.token))
    channels = ChannelPool(RpcSettings())
    try:
        instances = await _instances(registry)
        rows = [service_row(instance) for service in SERVICES for instance in instances[service]]
        print(render_table(SERVICE_COLUMNS, rows))
        for router in instances[ROUTER][:1]:
            views = await GrpcRouterClient(channels, router.address).list_workers(timeout_s=CALL_TIMEOUT_S)
            print("\n" + render_table(WORKER_COLUMNS, [worker_row(view) for view in views]))
        for planner in instances[PLANNER][:1]:
            plan = await GrpcPlannerClient(channels, planner.address).get_plan(timeout_s=CALL_TIMEOUT_S)
            print("\n" + render_table(LATENCY_COLUMNS, latency_rows(plan)))
            for problem in plan.problems:
                print(f"planner: {problem}")
        return 0
    except MeshError as error:
        print(f"kvmesh: {error.message}", file=sys.stderr)
        return 1
    finally:
        await channels.aclose()
        await registry.aclose()


def main(argv: Sequence[str]) -> int:
    try:
        settings = load(
            StatusSettings, argv=argv, environ=os.environ, program="kvmesh status", description=__doc__ or ""
        )
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    meshes = running_meshes()
    if not settings.consul and not settings.mesh and len(meshes) > 1:
        rows = [(mesh.name, mesh.url or "starting", mesh.registry, str(mesh.pid), mesh.run_dir) for mesh in meshes]
        print(render_table(MESH_COLUMNS, rows))
        print("kvmesh: choose one with --mesh NAME", file=sys.stderr)
        return 0
    try:
        address = settings.consul or find_mesh(settings.mesh, otherwise="--consul").registry
    except MeshError as error:
        print(f"kvmesh: {error.message}", file=sys.stderr)
        return 1
    return asyncio.run(_show(settings, address))
