"""A mesh whose services the test starts one by one on chosen hosts, so that it can stop each of them."""

import asyncio
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvmesh.discovery.base import DECODE, PREFILL, Instance
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.settings import DiscoverySettings
from tests.chaos.hosts import Host
from tests.integration.mesh import ROOT, metrics_text, worker_metric
from tests.servers import free_ports

READY_TIMEOUT_S = 300.0
LEASE_S = 2.0
PULL_TIMEOUT_S = 1.5
VLLM_ARGV = (
    *("--engine", "vllm", "--vllm-dtype", "float32"),
    *("--kv-lease-s", str(LEASE_S), "--kv-pull-timeout-s", str(PULL_TIMEOUT_S)),
)
SIMULATED_ARGV = (
    *("--engine", "simulated", "--simulated-kv-transport-delay-s", "0"),
    *("--kv-lease-s", str(LEASE_S), "--kv-pull-timeout-s", str(PULL_TIMEOUT_S)),
)
# Few blocks, so that freed blocks soon hold another prompt's KV.
POOLS = {
    ("vllm", "prefill"): ("--vllm-kv-cache-bytes", str(4 << 20)),
    ("vllm", "decode"): ("--vllm-kv-cache-bytes", str(8 << 20)),
    ("simulated", "prefill"): ("--simulated-kv-blocks", "256"),
    ("simulated", "decode"): ("--simulated-kv-blocks", "512"),
}


@dataclass(slots=True)
class Mesh:
    """Services by the name that the test gave them."""

    directory: Path
    engine: str
    model: Path
    registry_address: str
    environ: Mapping[str, str] = field(default_factory=dict)
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def start_registry(self, host: str) -> None:
        """Starts the registry on an address outside the test's hosts."""
        port = self.registry_address.rpartition(":")[2]
        await self.start(
            "registry",
            Host("registry", host),
            "kvmesh.discovery.embedded",
            "--host",
            host,
            "--port",
            port,
            "--insecure-listen",
        )

    async def start_service(self, name: str, service: str, host: Host, *argv: str) -> None:
        """Starts one service on a host. The service registers itself."""
        common = ("--discovery-address", self.registry_address, "--telemetry-log-level", "warning", "--insecure-listen")
        address = ("--rpc-host", host.address, "--telemetry-metrics-host", host.address)
        await self.start(name, host, f"services.{service}", *common, *address, *argv)

    async def start_worker(self, name: str, role: str, host: Host) -> None:
        """Starts a prefill or decode worker of the mesh's engine."""
        engine = VLLM_ARGV if self.engine == "vllm" else SIMULATED_ARGV
        side = ("--vllm-side-channel-host", host.address) if self.engine == "vllm" else ()
        pool = POOLS[self.engine, role]
        argv = ("--model", str(self.model), "--served-name", "m", "--worker-id", name)
        await self.start_service(name, role, host, *argv, *engine, *side, *pool)

    async def start(self, name: str, host: Host, module: str, *argv: str) -> None:
        """Starts a module as a separate process with a log in the directory."""
        with (self.directory / f"{name}.log").open("w") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *(*host.prefix, sys.executable, "-m", module, *argv),
                cwd=ROOT,
                env={**os.environ, **self.environ},
                stdout=log,
                stderr=log,
            )

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a service."""
        self.processes[name].send_signal(number)

    def check_alive(self) -> None:
        """Raises AssertionError with the end of its log if a service has ended."""
        for name, process in self.processes.items():
            assert process.returncode is None, f"{name} ended:\n{(self.directory / f'{name}.log').read_text()[-3000:]}"

    async def wait_serving(self, urls: Sequence[str]) -> None:
        """Waits until the frontends at these URLs serve the model."""
        async with asyncio.timeout(READY_TIMEOUT_S), aiohttp.ClientSession() as session:
            while not all([await _serves(session, url) for url in urls]):
                self.check_alive()
                await asyncio.sleep(0.2)

    async def instances(self, service: str) -> list[Instance]:
        """Returns a service's instances in the registry; none while the registry does not answer."""
        registry = ConsulRegistry(DiscoverySettings(address=self.registry_address))
        try:
            return list((await registry.instances(service)).instances)
        except Exception:
            return []
        finally:
            await registry.aclose()

    async def wait_free(self) -> None:
        """Waits until no worker holds blocks for a request or a lease."""
        async with asyncio.timeout(60):
            while await self._blocks_held():
                self.check_alive()
                await asyncio.sleep(0.2)

    async def _blocks_held(self) -> float:
        workers = [*await self.instances(PREFILL), *await self.instances(DECODE)]
        if not workers:
            return math.inf  # On a busy machine the registry may not answer in time.
        texts = [await metrics_text(each.host, int(each.meta["metrics_port"])) for each in workers]
        return sum(worker_metric(text, "kvmesh_worker_kv_blocks_used") for text in texts)

    async def aclose(self) -> None:
        """Ends all services, including stopped ones."""
        for process in self.processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes.values():
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                process.kill()
                await process.wait()


def registry_address(host: str) -> str:
    """Returns an address for the registry with a free port."""
    return f"{host}:{free_ports(1)[0]}"


async def _serves(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/v1/models") as response:
            return bool((await response.json())["data"])
    except (aiohttp.ClientError, KeyError):
        return False
