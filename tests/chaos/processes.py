"""A mesh of real processes, each of which can be killed, stopped, continued and restarted. Its engines are simulated by default."""

import asyncio
import shlex
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from kvmesh.cli.children import Child, ChildSpec, start_child
from kvmesh.cli.forked import Forked, fork_all
from kvmesh.cli.plan import MeshInputs, plan_mesh
from kvmesh.cli.up_settings import UpSettings
from kvmesh.core import LoadRecord, Role, WorkerView
from kvmesh.discovery.base import FRONTEND, ROUTER
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings, DiscoverySettings
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.rpc.settings import RpcSettings
from kvmesh.rpc.worker_client import GrpcWorkerClient
from tests.integration.mesh import stop_process
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "demo"
POLL_S = 0.05
TOKENS_SEEN = 10
"""Tokens that a worker must generate until its answers count as half done. These have up to 120."""
RECORDS_S = 0.1
"""How long a load record may take to a router. Workers send one every 10 ms while they generate."""


class ProcessMesh:
    """Processes by name: `decode-0`, `router-1`, `frontend-0`. `spares` are forked processes that can take any of these roles at once."""

    def __init__(
        self, directory: Path, specs: Sequence[ChildSpec], registry: ConsulRegistry, spares: list[Forked]
    ) -> None:
        self._spares = spares
        self.directory = directory
        self.specs = {spec.name: spec for spec in specs}
        self.children: dict[str, Child] = {}
        self.registry = registry
        self.url = ""
        self._channels = ChannelPool(settings=RpcSettings(connect_timeout_s=PATIENCE_S))

    async def start(self, name: str) -> None:
        """Starts a process, or restarts one that died. Does not wait until it is ready."""
        spec = self.specs[name]
        self.children[name] = self._spares.pop().start(spec) if self._spares else await start_child(spec)

    async def kill(self, name: str) -> None:
        """Sends SIGKILL and waits until the process has ended."""
        child = self.children.pop(name)
        child.signal_nowait(signal.SIGKILL)
        await child.exited.wait()

    async def stop(self, name: str) -> None:
        """Sends SIGSTOP and waits until the process has stopped."""
        await stop_process(self.children[name].pid)

    def go_on(self, name: str) -> None:
        """Sends SIGCONT."""
        self.children[name].signal_nowait(signal.SIGCONT)

    async def workers(self) -> list[WorkerView]:
        """Returns the workers that the first router that answers lists."""
        for router in (await self.registry.instances(ROUTER)).instances:
            if router.takes_requests:
                return list(await GrpcRouterClient(self._channels, router.address).list_workers(timeout_s=PATIENCE_S))
        return []

    async def set_role(self, worker: WorkerView, role: Role) -> None:
        """Moves a worker to the other pool. Raises MeshError if the worker refuses."""
        await GrpcWorkerClient(self._channels).set_role(worker.worker.address, role, timeout_s=PATIENCE_S)

    def name_of(self, worker: WorkerView) -> str:
        """Returns the name of a worker's process, whose process id is the end of the worker id."""
        pid = int(worker.worker.worker_id.rpartition("-")[2])
        return next((name for name, child in self.children.items() if child.pid == pid), "")

    async def stop_in_answers(self, name: str) -> None:
        """Stops a worker in the middle of two answers: it decodes two requests and has generated tokens since it has both."""
        tokens: int | None = None
        while True:
            load = await self._load(name)
            if load is None or load.running_requests < 2:
                tokens = None
            elif tokens is None:
                tokens = load.output_tokens_total
            elif load.output_tokens_total >= tokens + TOKENS_SEEN:
                await self.stop(name)
                # The answers may have ended before the worker was stopped. Its last records are still on their way to the router.
                await asyncio.sleep(RECORDS_S)
                load = await self._load(name)
                if load is not None and load.running_requests >= 2:
                    return
                self.go_on(name)
                tokens = None
            await asyncio.sleep(0.01)

    async def _load(self, name: str) -> LoadRecord | None:
        """Returns the last load record of a worker that a router has."""
        return next((each.load for each in await self.workers() if self.name_of(each) == name), None)

    async def taking(self, role: Role) -> list[WorkerView]:
        """Returns the workers of a role that take requests."""
        workers = [each for each in await self.workers() if each.role is role and not each.excluded_by]
        return [each for each in workers if self.name_of(each)]

    async def wait_ready(self, prefill: int, decode: int) -> None:
        """Waits until this many workers take requests and the frontend serves the model."""
        while (len(await self.taking(Role.PREFILL)), len(await self.taking(Role.DECODE))) != (prefill, decode):
            await asyncio.sleep(POLL_S)
        while not self.url:
            for each in (await self.registry.instances(FRONTEND)).instances:
                if each.takes_requests:
                    self.url = f"http://{each.host}:{each.meta['http_port']}"
            await asyncio.sleep(POLL_S)
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{self.url}/health") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(POLL_S)

    async def frontend_metric(self, name: str) -> float:
        """Returns the sum of a counter of the frontend over its labels."""
        for each in (await self.registry.instances(FRONTEND)).instances:
            url = f"http://{each.host}:{each.meta['metrics_port']}/metrics"
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                lines = (await response.text()).splitlines()
            return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))
        return 0.0

    def logs(self) -> str:
        """Returns the end of every log, for a failure message."""
        paths = sorted(self.directory.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in paths)

    async def aclose(self) -> None:
        """Ends all processes."""
        for child in self.children.values():
            child.signal_nowait(signal.SIGKILL)
        for child in self.children.values():
            await child.exited.wait()
        await self._channels.aclose()
        await self.registry.aclose()


def fork_spares(count: int) -> Sequence[Forked]:
    """Forks processes that have imported the services. Must be called before there is an event loop or thread; otherwise returns none."""
    modules = ("services.prefill", "services.decode", "services.router", "services.frontend")
    return tuple(
        fork_all([f"spare-{number}" for number in range(count)], [f"{each}.__main__" for each in modules]).values()
    )


@asynccontextmanager
async def process_mesh(
    directory: Path,
    *,
    engine: str = "simulated",
    policy: str = "kv",
    prefill: int = 1,
    decode: int = 2,
    routers: int = 2,
    engine_argv: Sequence[str] = (),
    frontend_argv: Sequence[str] = (),
    spares: Sequence[Forked] = (),
    ready_timeout_s: float = 180.0,
) -> AsyncIterator[ProcessMesh]:
    """Starts a mesh and waits until it can answer. Ends all its processes on exit."""
    async with AsyncExitStack() as stack:
        agent = EmbeddedAgent(AgentSettings())
        await agent.start()
        stack.push_async_callback(agent.aclose)
        settings = UpSettings(
            engine=engine,
            model=str(MODEL),
            prefill=prefill,
            decode=decode,
            routers=routers,
            gateway=False,
            planner=False,
            host="127.0.0.1",
            port=0,
            consul=agent.address,
            policy=policy,
            log_level="warning",
            run_dir=str(directory),
            engine_args=shlex.join(engine_argv),
            frontend_args=shlex.join(frontend_argv),
        )
        plan = plan_mesh(MeshInputs(settings=settings, registry=agent.address))
        specs = [*plan.workers, *plan.routers, *plan.frontends]
        mesh = ProcessMesh(
            directory=directory,
            specs=specs,
            registry=ConsulRegistry(DiscoverySettings(address=agent.address)),
            spares=list(spares),
        )
        stack.push_async_callback(mesh.aclose)
        for spec in specs:
            await mesh.start(spec.name)
        try:
            async with asyncio.timeout(ready_timeout_s):
                await mesh.wait_ready(prefill, decode)
        except TimeoutError as error:
            raise AssertionError(f"not ready after {ready_timeout_s:g} s\n{mesh.logs()}") from error
        yield mesh
