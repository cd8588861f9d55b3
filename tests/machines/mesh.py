"""A mesh with one service per host, including a real Consul. The tests are clients outside the hosts."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.discovery.base import SERVICES, Instance
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import MeshError
from kvmesh.identity.authority import Authority
from kvmesh.identity.credentials import Credentials, make_credentials
from tests.chaos.hosts import Hosts, make_hosts, network_problem
from tests.integration.mesh import ROOT, metrics_text, worker_metric
from tests.parts import is_required, require_part
from tests.patience import PATIENCE_S

CONSUL_PORT, HTTP_PORT = 8500, 8000
PORT_RANGE = "20000-20199"
CONSUL, ROUTER = "consul", "router"
READY_S = 180.0
HIDE = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
POLL_S = 0.05


@dataclass(slots=True, kw_only=True)
class Machines:
    """A running mesh. A service has the name of its host: `frontend-1`, `prefill-2`."""

    hosts: Hosts
    directory: Path
    model: Path
    engine_argv: Sequence[str]
    credentials: Credentials
    router_argv: Sequence[str] = ()
    ready_s: float = READY_S
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    @property
    def frontends(self) -> Sequence[str]:
        return [name for name in self.hosts.hosts if name.startswith("frontend")]

    @property
    def workers(self) -> Sequence[str]:
        return [name for name in self.hosts.hosts if name.startswith(("prefill", "decode"))]

    @property
    def registry(self) -> str:
        return self.hosts.hosts[CONSUL].at(CONSUL_PORT)

    def url(self, frontend: str) -> str:
        """Returns the URL of a frontend's HTTP API."""
        return f"http://{self.hosts.hosts[frontend].at(HTTP_PORT)}"

    def home(self, name: str) -> Path:
        """Returns the folder of a service's files. A host's disk survives a power loss."""
        return self.directory / f"{name}-home"

    async def start(self, name: str) -> None:
        """Starts the host's service, or restarts it if it died."""
        host = self.hosts.hosts[name]
        if name == CONSUL:
            binary = str(require_part("consul"))
            await self._run(name, [binary, "agent", "-dev", f"-bind={host.address}", f"-client={host.address}"])
            return
        service = name.partition("-")[0]
        before: Sequence[str] = ()
        argv = ["--discovery-address", self.registry, "--port-range", PORT_RANGE]
        argv += self.credentials.argv
        if service == "frontend":
            argv += ["--http-port", str(HTTP_PORT), "--http-allows-pins"]
            # The model exists on the workers' hosts only.
            before = ("sh", "-c", HIDE, str(self.model.parent))
        elif name == ROUTER:
            argv += self.router_argv
        elif name in self.workers:
            argv += ["--model", str(self.model), "--served-name", "m", "--worker-id", name, *self.engine_argv]
        await self._run(name, [*before, sys.executable, "-m", f"services.{service}", *argv])

    async def _run(self, name: str, command: Sequence[str]) -> None:
        guard = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
        # Workers use this machine's cache, because vLLM takes a minute to fill it.
        own = () if name in self.workers else ("cache", "state")
        places = {f"XDG_{each.upper()}_HOME": str(self.home(name) / each) for each in own}
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *(*self.hosts.hosts[name].prefix, *guard, *command),
                cwd=ROOT,
                env={**os.environ, **places},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def power_off(self, name: str) -> None:
        """Powers the host off."""
        self.hosts.power_off(name)
        await self.processes[name].wait()

    async def power_on(self, name: str) -> None:
        """Powers the host on and starts its service."""
        self.hosts.join(name, "all")
        await self.start(name)

    async def wait_serving(self) -> None:
        """Waits until every frontend serves the model."""
        async with asyncio.timeout(self.ready_s), aiohttp.ClientSession() as session:
            for name in self.frontends:
                while not await _serves(session, self.url(name)):
                    self.check_alive()
                    await asyncio.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raises AssertionError with the ends of the logs if a service has ended."""
        for name, process in self.processes.items():
            assert process.returncode is None, f"{name} ended\n{self.logs()}"

    async def wait_registered(self) -> None:
        """Waits until Consul, which may have restarted without its state, lists every service as passing."""
        wanted = [name for name in self.hosts.hosts if name != CONSUL]
        async with asyncio.timeout(READY_S):
            while sum(each.takes_requests for each in await self.instances()) < len(wanted):
                self.check_alive()
                await asyncio.sleep(POLL_S)

    async def instances(self) -> list[Instance]:
        """Returns the instances of all services; none while Consul does not answer."""
        registry = ConsulRegistry(DiscoverySettings(address=self.registry))
        try:
            return [each for service in SERVICES for each in (await registry.instances(service)).instances]
        except MeshError:
            return []
        finally:
            await registry.aclose()

    async def metric(self, name: str, metric: str) -> float:
        """Returns the present value of a worker's metric. Waits while Consul does not answer."""
        found: list[Instance] = []
        async with asyncio.timeout(PATIENCE_S):
            while not (found := [each for each in await self.instances() if each.instance_id == name]):
                await asyncio.sleep(POLL_S)
        (worker,) = found
        host = self.hosts.hosts[name]
        port = int(worker.meta["metrics_port"])
        return worker_metric(await metrics_text(host.at(0).rpartition(":")[0], port), metric)

    def logs(self) -> str:
        """Returns the end of every log, for a failure message."""
        paths = sorted(self.directory.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    async def aclose(self) -> None:
        """Ends all services."""
        for host in self.hosts.hosts.values():
            host.kill_all()
        for process in self.processes.values():
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), PATIENCE_S)


def require_hosts() -> None:
    """Skips the test if this machine cannot have separate hosts. If parts are required, fails if only a part is missing."""
    if problem := network_problem():
        can_be_had = is_required() and os.geteuid() == 0 and "does not allow" not in problem
        (pytest.fail if can_be_had else pytest.skip)(f"no hosts: {problem}")


@asynccontextmanager
async def machines(
    directory: Path,
    names: Sequence[str],
    *,
    model: Path,
    engine_argv: Sequence[str],
    router_argv: Sequence[str] = (),
    version: int = 4,
    ready_s: float = READY_S,
) -> AsyncIterator[Machines]:
    """Starts a service on a host for each name, and Consul. Waits until all frontends serve. Skips the test if hosts cannot be created."""
    require_part("consul")
    require_part("nixl")
    require_hosts()
    with make_hosts([CONSUL, *names], with_network=True, version=version) as hosts:
        credentials = make_credentials(directory / "credentials", authority=Authority.make(), token=b"")
        mesh = Machines(
            hosts=hosts,
            directory=directory,
            model=model,
            engine_argv=engine_argv,
            router_argv=router_argv,
            credentials=credentials,
            ready_s=ready_s,
        )
        try:
            for name in hosts.hosts:
                await mesh.start(name)
            await mesh.wait_serving()
            yield mesh
        finally:
            await mesh.aclose()


async def _serves(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=2)) as response:
            answer: Any = await response.json()
            return response.status == 200 and bool(answer["data"])
    except (aiohttp.ClientError, TimeoutError, KeyError):
        return False
