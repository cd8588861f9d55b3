"""`kvmesh drain WORKER` and `kvmesh role WORKER ROLE`: what operators do to one worker."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvmesh.cli.connection import MeshChoice, MeshConnection, MeshTarget, connect, run_command
from kvmesh.core import Role
from kvmesh.discovery.base import DECODE, PREFILL, Instance
from kvmesh.errors import NotFoundError
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.settings import setting, split_operands

REPLY_S = 5.0
"""Beyond the time that the worker may take."""
POOLS = (Role.PREFILL, Role.DECODE)
Action = Callable[[GrpcWorkerClient, str], Awaitable[str]]
"""Does something to the worker at an address, and returns what to print."""


@dataclass(frozen=True, kw_only=True)
class DrainSettings(MeshChoice):
    """Settings of `kvmesh drain`."""

    undo: bool = setting(False, "let the worker accept requests again")
    timeout_s: float = setting(30.0, "longest wait for the requests in flight", min=0.0, max=3600.0)


@dataclass(frozen=True, kw_only=True)
class RoleSettings(MeshChoice):
    """Settings of `kvmesh role`."""

    timeout_s: float = setting(10.0, "longest wait for the worker", min=0.1, max=600.0)


def drain(argv: Sequence[str]) -> int:
    """`kvmesh drain WORKER`."""
    operands, flags = split_operands(DrainSettings, argv)

    def act(settings: DrainSettings) -> int:
        if len(operands) != 1:
            return _misused("name one worker: kvmesh drain WORKER. `kvmesh status` lists them")

        async def drain_one(client: GrpcWorkerClient, address: str) -> str:
            left = await client.drain(
                address, undo=settings.undo, drain_timeout_s=settings.timeout_s, timeout_s=settings.timeout_s + REPLY_S
            )
            if settings.undo:
                return "accepts requests again"
            return f"is draining; {left} requests are still in flight" if left else "is drained"

        return _run(settings, operands[0], drain_one)

    description = "Rejects new requests on a worker and waits for those in flight."
    return run_command(DrainSettings, flags, act, program="kvmesh drain WORKER", description=description)


def role(argv: Sequence[str]) -> int:
    """`kvmesh role WORKER prefill|decode`."""
    operands, flags = split_operands(RoleSettings, argv)

    def act(settings: RoleSettings) -> int:
        wanted = next((each for each in POOLS if operands[1:] == [each.value]), None)
        if wanted is None:
            return _misused("name one worker and its new role: kvmesh role WORKER prefill|decode")

        async def set_role(client: GrpcWorkerClient, address: str) -> str:
            present = await client.set_role(address, wanted, timeout_s=settings.timeout_s)
            return f"is a {present.value} worker"

        return _run(settings, operands[0], set_role)

    description = "Moves a worker to the other pool without a restart. Requests in flight continue."
    return run_command(RoleSettings, flags, act, program="kvmesh role WORKER prefill|decode", description=description)


def _misused(problem: str) -> int:
    print(f"kvmesh: {problem}", file=sys.stderr)
    return 2


def _run(choice: MeshChoice, worker_id: str, act: Action) -> int:
    print(f"{worker_id} {asyncio.run(_act(choice.target(), worker_id, act))}")
    return 0


async def _act(target: MeshTarget, worker_id: str, act: Action) -> str:
    async with connect(target) as connection:
        worker = await _find(connection, worker_id)
        return await act(GrpcWorkerClient(connection.channels), worker.address)


async def _find(connection: MeshConnection, worker_id: str) -> Instance:
    views = [await connection.registry.instances(service) for service in (PREFILL, DECODE)]
    workers = {each.instance_id: each for view in views for each in view.instances}
    if worker_id not in workers:
        known = ", ".join(sorted(workers)) or "none"
        raise NotFoundError(f"no worker {worker_id} is registered; workers: {known}", reason="worker_not_found")
    return workers[worker_id]
