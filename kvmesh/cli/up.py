"""`kvmesh up`: a whole mesh on one machine, as separate processes, until Ctrl-C or a death it cannot go on after."""

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvmesh.cli.answer import stream_answer
from kvmesh.cli.children import Child, ChildSpec, fork_child, start_child, stop_children, wait_first_exit
from kvmesh.cli.forked import Forked, fork_all
from kvmesh.cli.plan import MeshPlan, MeshShape, plan_mesh
from kvmesh.cli.progress import Progress
from kvmesh.cli.state import MeshState, remove_state, write_state
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings, DiscoverySettings
from kvmesh.errors import MeshError, UnauthenticatedError
from kvmesh.settings import SettingsError, load, setting
from kvmesh.worker.forkserver import ForkServer

GREETING_TOKENS_MAX = 64
DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """What to start."""

    engine: str = setting("vllm", "engine of all workers", choices=("vllm", "simulated"))
    model: str = setting(str(DEMO_MODEL), "model directory in Hugging Face layout")
    served_name: str = setting("", "name clients ask for; empty: the directory's name")
    prefill: int = setting(1, "prefill workers; 0: decode workers compute prompts themselves", min=0, max=64)
    decode: int = setting(1, "decode workers", min=1, max=64)
    routers: int = setting(1, "routers, all active; with two, one may die and no request fails", min=1, max=16)
    frontend_processes: int = setting(1, "frontend processes that share the HTTP port", min=1, max=64)
    gateway: bool = setting(
        True,
        "one process for frontend and router where there is one of each: asks need no network. No: a process for each",
    )
    fork: bool = setting(
        True,
        "services are forks of one process that has imported them, and share that memory (Linux, simulated engines)."
        " No: each starts by itself",
    )
    planner: bool = setting(True, "a planner, which observes the pools by scraping them")
    host: str = setting("127.0.0.1", "address the frontend listens on")
    port: int = setting(8000, "port of the frontend's HTTP API; 0: any free one", min=0, max=65535)
    grpc_port: int = setting(0, "port of the frontend's gRPC API; 0: any free one", min=0, max=65535)
    consul: str = setting("", "address of a Consul agent; empty: an embedded registry")
    policy: str = setting(
        "kv", "how requests are placed: a policy of the router or of a package beside it (docs/routing-cost.md)"
    )
    engine_args: str = setting(
        "", "more flags for every worker, as one string: --engine-args='--simulated-time-factor 0'"
    )
    router_args: str = setting(
        "", "more flags for every router, as one string: --router-args='--cost-temperature 0.01'"
    )
    frontend_args: str = setting("", "more flags for the frontend, as one string: --frontend-args=--http-allows-pins")
    log_level: str = setting("info", "log level of all services", choices=("debug", "info", "warning", "error"))
    run_dir: str = setting("run", "directory of the services' logs")
    ready_timeout_s: float = setting(300.0, "longest wait until the mesh can answer", min=1.0)
    stop_timeout_s: float = setting(20.0, "longest wait for each group of services to stop", min=0.1)
    greeting: str = setting("Hello! Who are you?", "asked once the mesh is ready; empty: nothing is asked")
    once: bool = setting(False, "stop after the greeting is answered")
    api_key: str = setting("", "key that the greeting is asked with, where the frontend wants one", secret=True)


class Mesh:
    """The running processes of one `kvmesh up`."""

    def __init__(self, settings: UpSettings, *, started_at_s: float, forked: Mapping[str, Forked]) -> None:
        self._settings = settings
        self._forked = forked
        self._progress = Progress(sys.stderr)
        self.started_at_s = started_at_s
        self.children: list[Child] = []
        self._groups: list[list[Child]] = []
        self._told: list[Child] = []
        self._stack = AsyncExitStack()
        """What must outlive the children's orderly stop: the fork server."""

    async def run(self) -> int:
        """Starts everything, serves, stops everything; the exit status."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop.set)
        stopped = asyncio.create_task(stop.wait())
        async with AsyncExitStack() as stack:
            stack.callback(stopped.cancel)
            registry_address = await self._start_registry(stack)
            await stack.enter_async_context(self._stack)
            stack.push_async_callback(self._stop)
            serving = asyncio.create_task(self._serve(registry_address))
            stack.callback(serving.cancel)
            await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return 0
            try:
                return serving.result()
            except MeshError as error:
                self._progress.say(error.message)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self._progress.say(f"{type(error).__name__}: {error}")
            return 1

    async def _start_registry(self, stack: AsyncExitStack) -> str:
        if self._settings.consul:
            return self._settings.consul
        agent = EmbeddedAgent(AgentSettings())
        await agent.start()
        stack.push_async_callback(agent.aclose)
        return agent.address

    async def _serve(self, registry_address: str) -> int:
        """Until a child dies, or the greeting is answered with `once`."""
        plan = plan_mesh(mesh_shape(self._settings, registry_address))
        ready = asyncio.create_task(self._become_ready(registry_address, plan))
        await self._start_children(plan)
        death = asyncio.create_task(self._watch_deaths(ready))
        try:
            await asyncio.wait({ready, death}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and not death.done():
                if not ready.result():
                    return 1
                if self._settings.once:
                    return 0
                await death
            return 1
        finally:
            ready.cancel()
            death.cancel()

    async def _watch_deaths(self, ready: asyncio.Task[bool]) -> None:
        """Tells of every child that dies; returns when the mesh cannot become ready or cannot answer any more."""
        while True:
            dead = await wait_first_exit([child for child in self.children if child not in self._told])
            self._told.append(dead)
            self._progress.say("a part of the mesh died: " + dead.reason())
            if not ready.done() or not self._can_answer():
                self._progress.say("the mesh cannot go on without it")
                return

    def _can_answer(self) -> bool:
        """True while a frontend, a router and a decode worker run: decode workers can compute prompts themselves."""
        alive = {child.spec.module for child in self.children if not child.exited.is_set()}
        has_entry = "services.gateway" in alive or {"services.frontend", "services.router"} <= alive
        return has_entry and "services.decode" in alive

    async def _start_children(self, plan: MeshPlan) -> None:
        """Workers are forked from one process that imported the engine, where that is slow; meanwhile the rest starts."""
        workers: list[Child] = []
        self._groups.append(workers)
        forking = None
        if self._settings.engine == "vllm":
            forking = asyncio.create_task(self._start_fork_server())
        else:
            await self._start_group(plan.workers, workers)
        for specs in (plan.routers, plan.frontends, plan.planners):
            group: list[Child] = []
            self._groups.append(group)
            await self._start_group(specs, group)
        if forking is not None:
            await self._start_group(plan.workers, workers, await forking)

    async def _start_group(
        self, specs: Sequence[ChildSpec], group: list[Child], server: ForkServer | None = None
    ) -> None:
        """Each child is in its group as soon as it runs: a stop that comes in between must find it."""
        for spec in specs:
            child = await self._start(spec, server)
            group.append(child)

    async def _start_fork_server(self) -> ForkServer:
        self._progress.say("importing vLLM")
        run_dir = make_run_dir(self._settings.run_dir)
        server = await ForkServer.start(
            "vllm", timeout_s=self._settings.ready_timeout_s, log=str(run_dir / "fork-server.log")
        )
        self._stack.push_async_callback(server.aclose)
        return server

    async def _start(self, spec: ChildSpec, server: ForkServer | None = None) -> Child:
        spec.log_path.unlink(missing_ok=True)
        if (forked := self._forked.get(spec.name)) is not None:
            child = forked.start(spec)
        else:
            child = await (start_child(spec) if server is None else fork_child(server, spec))
        self.children.append(child)
        return child

    async def _become_ready(self, registry_address: str, plan: MeshPlan) -> bool:
        """Waits for the frontend to have a model, tells people, and asks the greeting."""
        async with AsyncExitStack() as stack:
            registry = ConsulRegistry(DiscoverySettings(address=registry_address))
            stack.push_async_callback(registry.aclose)
            specs = [*plan.workers, *plan.routers, *plan.frontends, *plan.planners]
            names = [spec.name for spec in specs]
            awaited = [spec.name for spec in specs if not self._joins_later(spec)]
            try:
                async with asyncio.timeout(self._settings.ready_timeout_s):
                    url = await self._progress.wait_ready(registry, names, awaited, self.started_at_s)
            except TimeoutError:
                self._progress.say(
                    f"not ready after {self._settings.ready_timeout_s:g} s; logs are in {self._settings.run_dir}"
                )
                return False
            write_state(MeshState(registry=registry_address, url=url, pid=os.getpid()))
            stack.callback(lambda: remove_state(os.getpid()) if self._settings.once else None)
            self._progress.say(f"ready after {time.monotonic() - self.started_at_s:.1f} s: {url}")
            await self._greet(url)
            return True

    def _joins_later(self, spec: ChildSpec) -> bool:
        """Simulated prefill workers register when NIXL is loaded; decode workers answer alone until then."""
        return self._settings.engine == "simulated" and spec.module == "services.prefill"

    async def _greet(self, url: str) -> None:
        model = await _first_model(url)
        print(curl_line(url, model, has_key=bool(self._settings.api_key)), flush=True)
        if self._settings.greeting:
            print(f"\n> {self._settings.greeting}", flush=True)
            messages = [{"role": "user", "content": self._settings.greeting}]
            api_key = self._settings.api_key
            try:
                await stream_answer(
                    url, model, messages, self.started_at_s, api_key=api_key, max_tokens=GREETING_TOKENS_MAX
                )
            except UnauthenticatedError as error:
                # The mesh is as it was told to be.
                self._progress.say(error.message)
            print(flush=True)

    async def _stop(self) -> None:
        """Frontends first, so that no request is taken that nobody can finish; workers last."""
        self._progress.say("stopping")
        remove_state(os.getpid())
        await stop_children(list(reversed(self._groups)), self._settings.stop_timeout_s)


def mesh_shape(settings: UpSettings, registry_address: str) -> MeshShape:
    """What is asked for, made plain."""
    model = Path(settings.model).expanduser()
    return MeshShape(
        engine=settings.engine,
        model=model.resolve() if model.exists() else model,
        served_name=settings.served_name,
        prefill=settings.prefill,
        decode=settings.decode,
        routers=settings.routers,
        host=settings.host,
        port=settings.port,
        grpc_port=settings.grpc_port,
        registry=registry_address,
        policy=settings.policy,
        log_level=settings.log_level,
        run_dir=Path(settings.run_dir).resolve(),
        engine_argv=tuple(shlex.split(settings.engine_args)),
        router_argv=tuple(shlex.split(settings.router_args)),
        frontend_argv=tuple(shlex.split(settings.frontend_args)),
        frontend_processes=settings.frontend_processes,
        has_gateway=settings.gateway,
        has_planner=settings.planner,
    )


def fork_services(settings: UpSettings) -> Mapping[str, Forked]:
    """A waiting process for each service by its name; none: they are started as programs of their own."""
    # vLLM's import takes longest and must begin first, in a fork server of its own; the services are small beside it.
    if not settings.fork or settings.engine == "vllm":
        return {}
    plan = plan_mesh(mesh_shape(settings, ""))
    specs = (*plan.workers, *plan.routers, *plan.frontends, *plan.planners)
    return fork_all([spec.name for spec in specs], [f"{spec.module}.__main__" for spec in specs])


def make_run_dir(path: str) -> Path:
    """The directory of the logs, made if need be."""
    run_dir = Path(path).resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


async def _first_model(url: str) -> str:
    """Asked where no key is needed."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        body = await response.json()
    return str(body["models"][0])


def curl_line(url: str, model: str, *, has_key: bool = False) -> str:
    """A line to paste into a shell."""
    body = f'{{"model":"{model}","stream":true,"messages":[{{"role":"user","content":"Hello!"}}]}}'
    key = ' -H "authorization: Bearer $KVMESH_API_KEY"' if has_key else ""
    return f"\ncurl -N {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"


def model_problem(model: str) -> str:
    """Why a model cannot be served, as far as one can see from here; names that are no paths are left to the engine."""
    path = Path(model).expanduser()
    if path.is_dir():
        missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
        return f"{path} is no model directory: {' and '.join(missing)} is missing" if missing else ""
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        return f"the model directory {path} does not exist"
    return ""


def main(argv: Sequence[str]) -> int:
    """`kvmesh up`."""
    started_at_s = time.monotonic()
    try:
        settings = load(UpSettings, argv=argv, environ=os.environ, program="kvmesh up", description=__doc__ or "")
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    problem = model_problem(settings.model)
    if problem:
        print(f"kvmesh: {problem}", file=sys.stderr)
        return 2
    forked = fork_services(settings)
    return asyncio.run(Mesh(settings, started_at_s=started_at_s, forked=forked).run())
