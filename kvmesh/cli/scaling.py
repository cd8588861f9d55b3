"""The scaler of `kvmesh up` and the server at which the mesh's planner reaches it."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack

from kvmesh.cli.keeper import Keeper, Slot, Start
from kvmesh.cli.plan import MeshInputs, worker_spec
from kvmesh.cli.scaler import LocalScaler
from kvmesh.cli.servicer import SERVICE_NAME, ScalerServicer
from kvmesh.core import Role
from kvmesh.identity.certificates import CertificateSource
from kvmesh.rpc.authorisation import AuthorisationInterceptor
from kvmesh.rpc.interceptors import ErrorInterceptor
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings

WORKERS_MAX = 64
"""Of each pool, as the flags of `kvmesh up` allow."""


class ScalingPart:
    """Listens on this machine only, because `kvmesh up` starts its planner here."""

    def __init__(self) -> None:
        self._servicer = ScalerServicer()
        self._running: asyncio.Task[None] | None = None

    async def start(self, stack: AsyncExitStack, mesh: CertificateSource | None) -> str:
        """Starts to listen, and closes with the stack. Returns the address."""
        server = RpcServer(
            RpcSettings(),
            service_names=(SERVICE_NAME,),
            add_services=self._servicer.add_to,
            interceptors=(ErrorInterceptor(), *([] if mesh is None else [AuthorisationInterceptor(mesh)])),
            mesh=mesh,
        )
        await server.start()
        await server.set_serving(True)
        stack.push_async_callback(server.aclose)
        return server.address

    def begin(self, keeper: Keeper, workers: list[Slot], inputs: MeshInputs, *, start: Start) -> None:
        """Sizes the pools of the mesh from now on."""
        scaler = LocalScaler(
            keeper,
            workers,
            model=inputs.settings.served_name or inputs.settings.model_path.name,
            make_spec=lambda role, number: worker_spec(inputs, role.value, number),
            start=start,
            workers_max=workers_max(inputs),
        )
        self._servicer.scaler = scaler
        self._running = asyncio.create_task(scaler.run(), name="scaler")

    async def end(self) -> None:
        """Starts and stops no more workers."""
        self._servicer.scaler = None
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])


def workers_max(inputs: MeshInputs) -> Mapping[Role, int]:
    """Returns the most workers of each role. Where workers have devices of their own, there is none for another worker."""
    has_devices = bool(inputs.places.argv)
    return {
        Role.PREFILL: inputs.settings.prefill if has_devices else WORKERS_MAX,
        Role.DECODE: inputs.settings.decode if has_devices else WORKERS_MAX,
    }
