"""`kvmesh doctor`: checks a machine, or a running mesh, with advice for each problem.

With --mesh or --consul it checks that mesh and starts nothing. Otherwise it runs ten checks of this machine and of a mesh on it: it starts
a mesh of its own, then one vLLM engine alone and `vllm serve`, on CPU or GPU, and ends them all.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvmesh.cli import probe
from kvmesh.cli.connection import MeshTarget, choose_target, connect, run_command, target_of
from kvmesh.cli.gpu_needs import compiler_needs, driver_needs
from kvmesh.cli.gpu_plan import installed_build
from kvmesh.cli.mesh_doctor import MeshDoctor
from kvmesh.cli.nvidia import Driver, read_driver, visible_devices
from kvmesh.cli.state import MeshState
from kvmesh.cli.up_settings import DEMO_MODEL, model_problem
from kvmesh.cli.verdicts import (
    Finding,
    Status,
    build_finding,
    compiler_finding,
    devices_finding,
    driver_finding,
    exactness_finding,
    exit_status,
    failed,
    moved_finding,
    ok,
    skipped,
    throughput_finding,
    transport_finding,
    transports_in,
)
from kvmesh.core import Role
from kvmesh.discovery.base import DECODE
from kvmesh.engines.vllm.registration import VLLM_GPU
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.identity.settings import IdentitySource
from kvmesh.network.names import host_port
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.settings import setting

EXIT_STOPPED = 130
MESH_CHECKS = ("mesh", "UCX transport", "KV moved", "exactness", "throughput")
ANSWER_TOKENS = 16
PROMPT_WORDS = (24, 60, 120, 200, 320)
"""A few blocks and more, since short prompts are not handed off."""
NIXL_PROBE = """
import importlib, os
from kvmesh.kv.nixl_api import api_module
module = importlib.import_module(api_module())
module.nixl_agent("kvmesh-doctor", module.nixl_agent_config(backends=["UCX"]))
os._exit(0)
"""
NIXL_TIMEOUT_S = 120.0
PREFILL_WAIT_S = 30.0
"""A prefill worker checks a transfer before it registers; with `--prefill 0` there is none."""
STOP_TIMEOUT_S = 60.0
POLL_S = 0.2
TAIL_LINES = 6
CPU_SERVER = "vllm.entrypoints.openai.api_server"
CPU_SERVE_FLAGS = ("--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", str(128 << 20))
"""The flags of the mesh's engines on a CPU."""


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Settings of `kvmesh doctor`."""

    mesh: str = setting("", "name of a mesh that `kvmesh up` runs here: checks this mesh")
    consul: str = setting("", "address of a Consul agent: checks the mesh that is registered there")
    discovery_token: str = setting("", "ACL token for the Consul agent", secret=True)
    credentials: str = setting(
        "", "folder with the operator's credentials (`kvmesh credentials`); empty: those of the mesh that runs here"
    )
    mesh_identity: IdentitySource = setting(
        IdentitySource.FILES, "as for services: where the operator's certificate comes from"
    )
    model: str = setting(str(DEMO_MODEL), "model directory in Hugging Face layout, or a hub name")
    own_mesh: bool = setting(True, "checks 6 to 10, which start a mesh and engines. False: only the machine is checked")
    up_args: str = setting("", "more flags for `kvmesh up`, as one string: --up-args='--tensor-parallel 2'")
    serve_args: str = setting("", "more flags for `vllm serve`, as one string")
    requests: int = setting(48, "requests of the throughput check", min=1, max=100_000)
    concurrency: int = setting(16, "concurrent requests in the throughput check", min=1, max=4096)
    timeout_s: float = setting(1200.0, "longest start of a mesh or an engine, a download included", min=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMesh:
    """The mesh under test."""

    url: str
    target: MeshTarget
    model: str
    run_dir: Path


class Doctor:
    """Runs the checks in order and prints each result."""

    def __init__(self, settings: DoctorSettings, run_dir: Path) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._build = installed_build(VLLM_GPU)
        self._driver = Driver()
        self.findings: list[Finding] = []

    async def run(self) -> int:
        """Runs all checks and returns the exit status. A signal ends it and everything that it has started."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
        self._check_machine()
        self._report(await self._check_nixl())
        if not self._settings.own_mesh:
            why = "--no-own-mesh"
        elif self._build == "gpu" and exit_status(self.findings):
            why = "a check above failed"
        else:
            why = ""
            await self._check_mesh()
        for check in MESH_CHECKS[len(self.findings) - 5 :]:
            self._report(skipped(check, why=why or "a check above failed"))
        return exit_status(self.findings)

    def _report(self, finding: Finding) -> None:
        self.findings.append(finding)
        print_finding(len(self.findings), finding)

    def _check_machine(self) -> None:
        """Checks 1 to 4."""
        driver, wanted = read_driver(), os.environ.get("CUDA_VISIBLE_DEVICES")
        self._driver = driver
        self._report(build_finding(self._build, driver))
        self._report(driver_finding(self._build, driver, driver_needs(driver)))
        self._report(devices_finding(self._build, driver, visible_devices(driver.devices, wanted), wanted=wanted))
        self._report(compiler_finding(self._build, compiler_needs()))

    async def _check_nixl(self) -> Finding:
        """Check 5: NIXL loads and makes an agent with UCX. In a separate process, since an agent's thread keeps running."""
        name, log = "NIXL", self._run_dir / "nixl.log"
        async with self._process(log, "-c", NIXL_PROBE, env={"NIXL_LOG_LEVEL": "ERROR"}) as process:
            try:
                async with asyncio.timeout(NIXL_TIMEOUT_S):
                    status = await process.wait()
            except TimeoutError:
                status = None
        if status == 0:
            return ok(name, "an agent with UCX starts")
        advice = "without NIXL no KV is transferred; --prefill 0 serves without it. KVMESH_ENGINE_BUILD=cpu make up, or gpu, installs it"
        found = tail(log) if status is not None else f"no agent after {NIXL_TIMEOUT_S:g} s"
        return Finding(check=name, status=Status.FAILED if self._build else Status.WARNING, found=found, advice=advice)

    async def _check_mesh(self) -> None:
        """Checks 6 to 10."""
        try:
            async with self._running_mesh() as mesh:
                self._report(ok("mesh", f"answers as {mesh.model} at {mesh.url}"))
                prompts, answers = await self._check_transfers(mesh)
                speed = await self._measure_tokens_per_s(mesh.url, model=mesh.model, first=1000)
            if self._build:
                await self._compare_with_vllm(prompts, answers, speed, model=mesh.model)
            else:
                for check in MESH_CHECKS[3:]:
                    self._report(skipped(check, why="there is no vLLM to compare with"))
        except (MeshError, OSError, TimeoutError, aiohttp.ClientError) as error:
            check = MESH_CHECKS[len(self.findings) - 5]
            self._report(failed(check, _text(error, self._settings.timeout_s)))

    async def _check_transfers(self, mesh: OwnMesh) -> tuple[list[list[int]], list[list[int]]]:
        """Checks 7 and 8. Returns the prompts and the mesh's answers."""
        await wait_prefill(mesh.target)
        texts = [probe.sentences(number, words=words) for number, words in enumerate(PROMPT_WORDS)]
        prompts = await probe.tokenise(mesh.url, model=mesh.model, texts=texts)
        before = await transferred_tokens(mesh.target)
        answers = await probe.greedy(url=mesh.url, model=mesh.model, prompts=prompts, tokens=ANSWER_TOKENS)
        moved = await transferred_tokens(mesh.target) - before
        log = (mesh.run_dir / "decode-0.log").read_text(errors="replace")
        if self._build:
            self._report(
                transport_finding(self._build, transports_in(log), is_one_device=len(self._driver.devices) == 1)
            )
        else:
            self._report(skipped("UCX transport", why="simulated engines"))
        self._report(moved_finding(moved, sum(len(prompt) for prompt in prompts)))
        return prompts, answers

    async def _compare_with_vllm(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], speed: float, *, model: str
    ) -> None:
        """Checks 9 and 10, after the mesh has ended, so that the engine has the device to itself."""
        self._report(exactness_finding(self._build, answers, await self._run_vllm_alone(prompts)))
        async with self._running_serve(model) as url:
            self._report(
                throughput_finding(
                    mesh_tokens_s=speed, serve_tokens_s=await self._measure_tokens_per_s(url, model=model, first=1000)
                )
            )

    async def _measure_tokens_per_s(self, url: str, model: str, *, first: int) -> float:
        settings = self._settings
        return await probe.tokens_per_s(
            url,
            model=model,
            requests=settings.requests,
            concurrency=settings.concurrency,
            prompt_words=120,
            tokens=64,
            first=first,
        )

    async def _run_vllm_alone(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        task = json.dumps({"model": self._settings.model, "prompts": prompts, "max_tokens": ANSWER_TOKENS})
        log = self._run_dir / "alone.log"
        async with self._process(log, "-m", "kvmesh.engines.vllm.alone", answers=True) as process:
            async with asyncio.timeout(self._settings.timeout_s):
                out, _ = await process.communicate(task.encode())
        for line in out.decode(errors="replace").splitlines():
            if line.startswith("ANSWERS "):
                answers: list[list[int]] = json.loads(line.removeprefix("ANSWERS "))
                return answers
        raise UnavailableError(f"vLLM alone gave no answer: {tail(log)}")

    @asynccontextmanager
    async def _running_mesh(self) -> AsyncIterator[OwnMesh]:
        """Runs `kvmesh up`, by default with one worker of each role."""
        state, log = self._run_dir / "mesh.json", self._run_dir / "up.log"
        settings = self._settings
        flags = ("--port", "0", "--run-dir", str(self._run_dir), "--greeting", "", "--no-planner")
        engine = () if self._build else ("--engine", "simulated")
        limit = ("--ready-timeout-s", str(settings.timeout_s))
        words = ("up", "--model", settings.model, *flags, *engine, *limit, *shlex.split(settings.up_args))
        env = {"KVMESH_STATE": str(state), "UCX_LOG_LEVEL": "info"}
        async with self._process(log, "-m", "kvmesh.cli", *words, env=env) as process:
            async with asyncio.timeout(settings.timeout_s):
                while not state.exists():
                    if process.returncode is not None:
                        raise UnavailableError(f"kvmesh up ended: {tail(log)}")
                    await asyncio.sleep(POLL_S)
            found = MeshState(**json.loads(state.read_text()))
            model = await first_model(found.url)
            yield OwnMesh(url=found.url, target=target_of(found), model=model, run_dir=self._run_dir)

    @asynccontextmanager
    async def _running_serve(self, model: str) -> AsyncIterator[str]:
        """Runs `vllm serve` with one engine. Yields its address."""
        log, port = self._run_dir / "serve.log", free_port()
        # The command `vllm` needs a package of that name, and the CPU build has another name.
        command = ("vllm.entrypoints.cli.main", "serve") if self._build == "gpu" else (CPU_SERVER, "--model")
        flags = () if self._build == "gpu" else CPU_SERVE_FLAGS
        address = ("--served-model-name", model, "--host", "127.0.0.1", "--port", str(port))
        argv = ("-m", *command, self._settings.model, *address, *flags, *shlex.split(self._settings.serve_args))
        # Several processes share the cores of a CPU. With a thread per core each they would slow each other down.
        env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if self._build == "cpu" else {}
        async with self._process(log, *argv, env=env) as process:
            url = f"http://127.0.0.1:{port}"
            async with asyncio.timeout(self._settings.timeout_s):
                while not await is_healthy(url):
                    if process.returncode is not None:
                        raise UnavailableError(f"vllm serve ended: {tail(log)}")
                    await asyncio.sleep(POLL_S)
            yield url

    @asynccontextmanager
    async def _process(
        self, log: Path, *argv: str, env: dict[str, str] | None = None, answers: bool = False
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Runs Python under a guard, which ends it and everything that it has started, also when this process is killed."""
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvmesh.cli.guard", str(os.getpid())),
                *(sys.executable, *argv),
                env={**os.environ, **(env or {})},
                stdin=asyncio.subprocess.PIPE if answers else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if answers else file,
                stderr=file,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            await stop(process)


def _text(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"timed out; --timeout-s is {timeout_s:g} s"
    return str(error) or type(error).__name__


async def stop(guard: asyncio.subprocess.Process) -> None:
    """Stops a guard's program as Ctrl-C does. After STOP_TIMEOUT_S the guard kills it."""
    try:
        send(guard, signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await guard.wait()
    finally:
        send(guard, signal.SIGTERM)
        await guard.wait()


def send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


async def transferred_tokens(target: MeshTarget) -> float:
    """Returns the sum of transferred_tokens_total over the decode workers."""
    registry, total = target.registry(), 0.0
    try:
        view = await registry.instances(DECODE)
        async with probe.session() as client:
            for instance in view.instances:
                address = f"http://{host_port(instance.host, int(instance.meta['metrics_port']))}/metrics"
                async with client.get(address) as response:
                    for line in (await response.text()).splitlines():
                        if line.startswith("kvmesh_worker_transferred_tokens_total"):
                            total += float(line.rpartition(" ")[2])
        return total
    finally:
        await registry.aclose()


async def wait_prefill(target: MeshTarget) -> None:
    """Waits until the router uses a prefill worker: it joins after the mesh answers. Returns after PREFILL_WAIT_S in any case."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PREFILL_WAIT_S), connect(target) as connection:
            while True:
                views = await connection.list_workers()
                if any(view.role is Role.PREFILL and not view.excluded_by for view in views):
                    return
                await asyncio.sleep(POLL_S)


async def first_model(url: str) -> str:
    """Returns the name of the mesh's model."""
    async with probe.session() as client, client.get(f"{url}/v1/models") as response:
        return str((await response.json())["data"][0]["id"])


async def is_healthy(url: str) -> bool:
    try:
        async with probe.session() as client, client.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return int(probe_socket.getsockname()[1])


def tail(log: Path) -> str:
    """Returns the last lines of a log, joined."""
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return " | ".join(line.strip() for line in lines if line.strip()) or "no output"


def print_finding(number: int, finding: Finding) -> None:
    print(f"{number:2} {finding.check:<14} {finding.status.value:<8} {finding.found}", flush=True)
    if finding.advice:
        print(f"{'':18}{'':9}-> {finding.advice}", flush=True)


def check_running_mesh(settings: DoctorSettings) -> int:
    """Returns the exit status."""

    async def run(target: MeshTarget) -> int:
        numbers = itertools.count(1)
        async with connect(target) as connection:
            client = GrpcWorkerClient(connection.channels)
            doctor = MeshDoctor(connection.registry, client, registry_address=target.address)
            return await doctor.run(lambda finding: print_finding(next(numbers), finding))

    target = choose_target(
        mesh=settings.mesh,
        consul=settings.consul,
        token=settings.discovery_token,
        credentials=settings.credentials,
        source=settings.mesh_identity,
    )
    return asyncio.run(run(target))


def main(argv: Sequence[str]) -> int:
    return run_command(DoctorSettings, argv, _check, program="kvmesh doctor", description=__doc__)


def _check(settings: DoctorSettings) -> int:
    if settings.mesh or settings.consul:
        return check_running_mesh(settings)
    if problem := model_problem(settings.model):
        print(f"kvmesh: {problem}", file=sys.stderr)
        return 2
    run_dir = Path(tempfile.mkdtemp(prefix="kvmesh-doctor-"))
    doctor = Doctor(settings, run_dir)
    try:
        status = asyncio.run(doctor.run())
    except asyncio.CancelledError:
        shutil.rmtree(run_dir, ignore_errors=True)
        return EXIT_STOPPED
    if {finding.status for finding in doctor.findings} <= {Status.OK, Status.SKIPPED}:
        shutil.rmtree(run_dir, ignore_errors=True)
    else:
        print(f"logs are in {run_dir}")
    return status
