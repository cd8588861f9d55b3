"""Starts single services as processes, with an embedded registry."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from kvmesh.core import WorkerRef
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings, DiscoverySettings

ROOT = Path(__file__).resolve().parents[1]
DEMO_MODEL = ROOT / "models" / "demo"


@asynccontextmanager
async def one_worker(role: str, argv: Sequence[str], start_s: float = 30.0) -> AsyncIterator[tuple[WorkerRef, int]]:
    """Starts a worker, simulated unless `argv` says otherwise. Yields it with its process id and ends it on exit."""
    agent = EmbeddedAgent(AgentSettings())
    await agent.start()
    registry = ConsulRegistry(DiscoverySettings(address=agent.address))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"services.{role}", "--engine", "simulated", "--model", str(DEMO_MODEL)),
        *("--discovery-address", agent.address, "--telemetry-log-level", "warning", *argv),
        cwd=ROOT,
    )
    try:
        yield await _worker_ref(registry, role, start_s), process.pid
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await registry.aclose()
        await agent.aclose()


async def _worker_ref(registry: ConsulRegistry, role: str, start_s: float) -> WorkerRef:
    async with asyncio.timeout(start_s):
        async for view in registry.watch(f"kvmesh-{role}"):
            for instance in view.instances:
                if instance.takes_requests:
                    return WorkerRef(
                        worker_id=instance.instance_id, address=instance.address, epoch=int(instance.meta["epoch"])
                    )
    raise AssertionError("a watch never ends by itself")
