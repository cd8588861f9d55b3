"""A whole mesh of real processes for a test: runs `kvmesh up` in a child process, reads its state file, and stops it by pid."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from kvmesh.cli.connection import MeshTarget, target_of
from kvmesh.cli.state import MeshState
from kvmesh.core import Role
from kvmesh.discovery.base import FRONTEND, ROUTER
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.identity.certificates import source_of
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.rpc.settings import RpcSettings
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
"""Time between two checks of a condition. Most checks open a connection, and the mesh needs the CPU."""


@dataclass(frozen=True, kw_only=True)
class PatientTarget(MeshTarget):
    """Gives up no call to the registry and no connection that is slow because the machine is busy."""

    def channels(self) -> ChannelPool:
        settings = RpcSettings(connect_timeout_s=PATIENCE_S)
        return ChannelPool(settings=settings, mesh=source_of(self._mesh.tls_directory))

    @property
    def _discovery(self) -> DiscoverySettings:
        return replace(super()._discovery, call_timeout_s=PATIENCE_S)


@dataclass(slots=True, kw_only=True)
class RunningMesh:
    """One running `kvmesh up`."""

    process: asyncio.subprocess.Process
    directory: Path
    url: str = ""
    registry: str = ""
    """Address of the registry."""
    target: MeshTarget = field(default_factory=lambda: MeshTarget(address=""))
    """The addresses and credentials that an operator needs to reach the registry and the services."""
    output: list[str] = field(default_factory=list)

    def pids(self, service: str) -> list[int]:
        """Returns the process ids of a service, in the order in which they were started."""
        found = []
        for child in descendants(self.process.pid):
            if f"services.{service}".encode() in command_line(child):
                found.append(child)
        return sorted(found)

    @property
    def flags(self) -> Sequence[str]:
        """Flags for commands that operate on this mesh."""
        assert self.target.credentials is not None
        return ("--consul", self.registry, "--credentials", str(self.target.credentials.folder))

    @property
    def service_flags(self) -> Sequence[str]:
        """Flags for a service that a test adds to the mesh."""
        assert self.target.credentials is not None
        return ("--discovery-address", self.registry, "--discovery-checks-tls", *self.target.credentials.argv)

    def logs(self) -> str:
        """Returns the end of every log, for the message of a failed test."""
        parts = [f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.directory.glob("*.log"))]
        return "\n".join(["== up", *self.output[-40:], *parts])


def command_line(pid: int) -> list[bytes]:
    """Returns the words of a process's command; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def children_of(pid: int) -> list[int]:
    """Returns the processes that any thread of the process has started. They may have ended."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The process has ended.
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended.
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Returns all descendants of a process."""
    return [each for child in children_of(pid) for each in (child, *descendants(child))]


@asynccontextmanager
async def running_mesh(
    directory: Path,
    *argv: str,
    ready_timeout_s: float = 90.0,
    env: dict[str, str] | None = None,
    token: str = "",
    prefix: Sequence[str] = (),
) -> AsyncIterator[RunningMesh]:
    """Starts a mesh and waits until it can serve requests. At the end, stops it and checks that no process is left.

    `prefix`: a program and its arguments, which gets the command's words as further arguments and executes them.
    """
    state = directory / "mesh.json"
    process = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        "-m",
        "kvmesh.cli",
        "up",
        *("--port", "0", "--run-dir", str(directory), *argv),
        cwd=ROOT,
        env={**os.environ, "KVMESH_STATE": str(state), "KVMESH_DISCOVERY_TOKEN": token, **(env or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    mesh = RunningMesh(process=process, directory=directory)
    reader = asyncio.create_task(_read_lines(process, mesh.output))
    try:
        try:
            async with asyncio.timeout(ready_timeout_s):
                await _wait_ready(mesh, reader)
        except TimeoutError as error:
            raise AssertionError(f"not ready after {ready_timeout_s:g} s\n{mesh.logs()}") from error
        yield mesh
    finally:
        left = descendants(process.pid) if process.returncode is None else []
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # As Ctrl-C does.
        await asyncio.wait_for(process.wait(), PATIENCE_S)
        reader.cancel()
        await _check_ended(left)


async def _check_ended(pids: Sequence[int]) -> None:
    """Checks that no process is left, and kills those that are.

    The children of a child may end after it: the kernel kills them when it ends, or they end at the end of their input.
    """

    def alive() -> list[int]:
        return [pid for pid in pids if is_running(pid)]

    try:
        await wait_until(lambda: not alive(), PATIENCE_S, lambda: f"left behind: {alive()}")
    finally:
        for pid in alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def joined_workers(
    mesh: RunningMesh, directory: Path, *argv: str, ready_timeout_s: float = 90.0
) -> AsyncIterator[RunningMesh]:
    """Starts another `kvmesh up` whose workers join the mesh, and waits until they are registered. Stops it at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvmesh.cli",
        "up",
        *("--join", mesh.registry, *mesh.flags[2:], "--run-dir", str(directory), *argv),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    joined = RunningMesh(process=process, directory=directory, registry=mesh.registry, url=mesh.url, target=mesh.target)
    reader = asyncio.create_task(_read_lines(process, joined.output))
    try:
        await wait_until(
            lambda: process.returncode is not None or any("ready after" in line for line in joined.output),
            ready_timeout_s,
            joined.logs(),
        )
        assert process.returncode is None, joined.logs()
        yield joined
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), PATIENCE_S)
        reader.cancel()


async def _wait_ready(mesh: RunningMesh, reader: asyncio.Task[None]) -> None:
    state = mesh.directory / "mesh.json"
    # `_wait_prefill` needs the first lines, which this process may read later than it sees the file.
    while not (state.exists() and any("starting" in line for line in mesh.output)):
        if mesh.process.returncode is not None:
            # The last lines of the output give the reason.
            await asyncio.wait({reader}, timeout=PATIENCE_S)
            raise AssertionError(mesh.logs())
        await asyncio.sleep(0.02)
    found = MeshState(**json.loads(state.read_text()))
    mesh.url, mesh.registry = found.url, found.registry
    mesh.target = PatientTarget(address=found.registry, credentials=target_of(found).credentials)
    await _wait_prefill(mesh)


async def _wait_prefill(mesh: RunningMesh) -> None:
    """Waits until the routers use all prefill workers. Simulated prefill workers join after the mesh can already serve requests."""
    wanted = sum("prefill-" in word for line in mesh.output if "starting" in line for word in line.split(","))
    registry, channels = mesh.target.registry(), mesh.target.channels()
    try:
        for router in (await registry.instances(ROUTER)).instances:
            client = GrpcRouterClient(channels, router.address)
            while await _usable_prefills(client) < wanted:
                await asyncio.sleep(POLL_S)
    finally:
        await channels.aclose()
        await registry.aclose()


async def _usable_prefills(router: GrpcRouterClient) -> int:
    workers = await router.list_workers(timeout_s=PATIENCE_S)
    return sum(worker.role is Role.PREFILL and not worker.excluded_by for worker in workers)


def process_state(pid: int) -> str:
    """Returns the state in /proc; Z if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # It may end between opening and reading the file.
        return "Z"


def is_running(pid: int) -> bool:
    """Returns False if the process has ended, also while its parent has not waited for it."""
    return process_state(pid) not in ("Z", "X")


async def _read_lines(process: asyncio.subprocess.Process, lines: list[str]) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        lines.append(line.decode(errors="replace").rstrip())


async def stop_process(pid: int) -> None:
    """Sends SIGSTOP and waits until all threads of the process have stopped.

    The thread that gets the signal stops the others, and it may be late: until then they still send and receive.
    """
    os.kill(pid, signal.SIGSTOP)
    await wait_until(lambda: set(_thread_states(pid)) == {"T"}, PATIENCE_S, f"process {pid} has stopped")


def _thread_states(pid: int) -> Sequence[str]:
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The process has ended.
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended.
                found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


async def chat(url: str, text: str, *, model: str = "demo", **options: object) -> dict[str, object]:
    """Runs one chat completion without streaming."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], **options}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer: dict[str, object] = await response.json()
        assert response.status == 200, answer
        return answer


def worker_metric(text: str, name: str) -> float:
    """Returns the sum of a metric's samples in a Prometheus exposition."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")))


async def metrics_text(host: str, port: int) -> str:
    """Returns the metrics of one service."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/metrics") as response:
        return await response.text()


async def wait_until(condition: Callable[[], object], timeout_s: float, what: str | Callable[[], str]) -> None:
    """Polls a plain or async condition until it is true. Raises AssertionError with `what` on timeout."""
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            while True:
                value = condition()
                if asyncio.iscoroutine(value):
                    value = await value
                if value:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        if not timeout.expired():
            raise
    raise AssertionError(f"after {timeout_s:g} s not yet: {what if isinstance(what, str) else what()}")


def argv_simulated(*more: str) -> Sequence[str]:
    """Returns the flags of a small simulated mesh."""
    return ("--engine", "simulated", "--greeting", "", *more)


async def grpc_address(mesh: RunningMesh) -> tuple[str, int]:
    """Returns the frontend's gRPC address, and the port of its metrics."""
    registry = mesh.target.registry()
    try:
        (frontend,) = (await registry.instances(FRONTEND)).instances
    finally:
        await registry.aclose()
    return f"{frontend.host}:{frontend.port}", int(frontend.meta["metrics_port"])
