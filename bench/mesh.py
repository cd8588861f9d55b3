"""Starts a mesh for a measurement: `kvmesh up` as a child process, with the process ids of its services."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.bound import bound
from bench.processes import descendants
from bench.services import DEMO_MODEL, ROOT
from kvmesh.cli.connection import MeshTarget, target_of
from kvmesh.cli.state import MeshState
from kvmesh.discovery.base import FRONTEND

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.01
SERVICES = ("gateway", "frontend", "router", "prefill", "decode", "planner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server under load: its address and model, and the processes whose CPU is counted."""

    system: str
    url: str
    model: str
    model_dir: Path
    watch: Mapping[str, int]
    prefill_url: str = ""
    """The engine's own prefill server, which also gets every request. Empty: there is none."""
    bootstrap_port: int = 0
    """Port on loopback where SGLang's prefill and decode servers connect. 0: the server is vLLM's."""
    grpc_address: str = ""
    key: str = ""
    """API key that HTTP requests must have. Empty: none."""
    beside: Mapping[str, int] = field(default_factory=dict)
    """Processes that take no part in requests: their memory is reported, their CPU is not counted."""
    target: MeshTarget | None = None
    """Address and credentials of the registry and services, if `kvmesh up` runs the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshKind:
    """Shape and engines of a mesh. Every worker gets `engine_argv`."""

    name: str
    engine_argv: Sequence[str]
    engine: str = "simulated"
    model_dir: Path = DEMO_MODEL
    prefills: int = 1
    """Prefill workers; 0: the decode worker computes prompts itself."""
    frontend_processes: int = 1
    up_flags: Sequence[str] = ()
    """Additional flags of `kvmesh up`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Settings of the services."""
    key: str = ""
    """API key that HTTP requests must have. Empty: none."""
    root: Path = ROOT
    """The source tree to run. A tree of an earlier commit has no `target` and no gRPC address."""


@asynccontextmanager
async def running_mesh(kind: MeshKind) -> AsyncIterator[Served]:
    """Starts a mesh. Stops it on exit, and kills it if it does not stop."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        state = Path(folder) / "mesh.json"
        with (Path(folder) / "up.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *bound(
                    (
                        *("env", f"--chdir={kind.root}", f"PYTHONPATH={kind.root}"),
                        *up_argv(kind.engine, kind.model_dir, kind.engine_argv, run_dir=Path(folder)),
                        *("--greeting", "", "--log-level", "warning", "--prefill", str(kind.prefills)),
                        *("--frontend-processes", str(kind.frontend_processes), *kind.up_flags),
                    )
                ),
                cwd=ROOT,
                env={**os.environ, **kind.environment, "KVMESH_STATE": str(state)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            await _wait_state(process, state, Path(folder))
            yield await _served(process.pid, json.loads(state.read_text()), kind)
        finally:
            await _stop(process)


def up_argv(engine: str, model_dir: Path, engine_argv: Sequence[str], *, run_dir: Path) -> Sequence[str]:
    """Returns the command line of a mesh on free ports."""
    return (
        *(sys.executable, "-m", "kvmesh.cli", "up", "--engine", engine, "--model", str(model_dir)),
        *("--served-name", "bench", "--port", "0", "--run-dir", str(run_dir)),
        f"--engine-args={' '.join(engine_argv)}",
    )


async def _wait_state(process: asyncio.subprocess.Process, state: Path, folder: Path) -> None:
    async with asyncio.timeout(READY_TIMEOUT_S):
        while not os.path.exists(state):  # noqa: ASYNC240 (a file of another process, on a local disk)
            if process.returncode is not None:
                raise RuntimeError(f"the mesh ended with status {process.returncode}:\n{_log_ends(folder)}")
            await asyncio.sleep(POLL_S)


def _log_ends(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.log")))


async def _served(pid: int, state: Mapping[str, Any], kind: MeshKind) -> Served:
    target = target_of(MeshState(**state)) if kind.root == ROOT else None
    return Served(
        system="kvmesh",
        url=state["url"],
        model="bench",
        model_dir=kind.model_dir,
        watch=_service_pids(pid),
        key=kind.key,
        grpc_address=await _grpc_address(target) if target else "",
        beside={"up": pid},
        target=target,
    )


def _service_pids(pid: int) -> Mapping[str, int]:
    """Returns the services' process ids by name, without `up` and its registry, which take no part in requests."""
    found: dict[str, int] = {}
    for child in descendants(pid):
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace").split("\0")
        for service in SERVICES:
            if f"services.{service}" in words:
                # If a service has several processes, the first one is their parent.
                found.setdefault(service, child)
    return {service: found[service] for service in SERVICES if service in found}


async def _grpc_address(target: MeshTarget) -> str:
    registry = target.registry()
    try:
        async for view in registry.watch(FRONTEND):
            for instance in view.instances:
                return instance.address
    finally:
        await registry.aclose()
    raise AssertionError("a watch never ends by itself")


async def _stop(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
