"""The planner's actions on workers, with real gRPC and a registry."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvmesh.api.worker.v1 import worker_pb2 as pb
from kvmesh.core import Role
from kvmesh.discovery.base import ROLE_CHANGE
from kvmesh.errors import DeadlineError, NotFoundError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.settings import RpcSettings
from kvmesh.simulation.registry import MemoryAgent
from services.planner.connectors.mesh import MeshActions
from tests.integration.workers import ToldWorker
from tests.patience import PATIENCE_S

SLOW_S = 0.5


class SlowWorker(ToldWorker):
    """A worker that waits for its requests in flight before it changes its role."""

    async def SetRole(self, request: pb.SetRoleRequest, context: object) -> pb.SetRoleResponse:
        await asyncio.sleep(PATIENCE_S)
        return pb.SetRoleResponse(role=request.role)


async def test_a_slow_change_of_role_is_accepted_when_it_has_begun() -> None:
    """The call returns in time if the worker has announced the change. It fails if the worker has announced none, or another one."""
    async with AsyncExitStack() as stack:
        registry = MemoryAgent().registry()
        channels = ChannelPool(settings=RpcSettings())
        stack.push_async_callback(channels.aclose)
        worker = SlowWorker("p1", "prefill")
        await worker.start(registry)
        stack.push_async_callback(worker.die)
        actions = MeshActions(registry, channels)
        with pytest.raises(DeadlineError):
            await actions.flip("p1", Role.DECODE, fencing_token=1, timeout_s=SLOW_S)
        await registry.set_draining("p1", True, reason=ROLE_CHANGE + "decode")
        await actions.flip("p1", Role.DECODE, fencing_token=1, timeout_s=SLOW_S)
        with pytest.raises(DeadlineError):
            await actions.flip("p1", Role.PREFILL, fencing_token=1, timeout_s=SLOW_S)
        with pytest.raises(NotFoundError):
            await actions.flip("p2", Role.DECODE, fencing_token=1, timeout_s=SLOW_S)
