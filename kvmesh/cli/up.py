"""`kvmesh up`: a whole mesh on one machine, as separate processes, until Ctrl-C, or until it can no longer serve."""

import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from kvmesh.cli.answer import stream_answer
from kvmesh.cli.children import Child, ChildSpec, WorkerForks, start_child, stop_children, wait_first_exit
from kvmesh.cli.connection import MeshTarget
from kvmesh.cli.forked import Forked, fork_all
from kvmesh.cli.gpu_plan import WorkerPlaces, installed_build, place_on_gpus
from kvmesh.cli.keeper import Keeper, RestartPolicy, Slot, Start, with_ports
from kvmesh.cli.loading import POLL_S, LogWatch, wait_while_it_goes_on
from kvmesh.cli.nvidia import read_driver
from kvmesh.cli.output import discard
from kvmesh.cli.plan import MeshInputs, MeshPlan, plan_mesh
from kvmesh.cli.progress import Progress, http_url
from kvmesh.cli.scaling import ScalingPart
from kvmesh.cli.start_checks import consul_problem, engine_problem, hub_problem, is_hub_name, port_problems
from kvmesh.cli.state import MeshPlace, claim_place, default_name, find_mesh
from kvmesh.cli.up_credentials import has_mesh_tls, keep_renewed, own_credentials
from kvmesh.cli.up_settings import UpSettings, adapt_to_packages, model_problem, worker_groups
from kvmesh.clock import SystemClock
from kvmesh.discovery.base import Registry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings
from kvmesh.errors import InvalidRequestError, MeshError, UnauthenticatedError
from kvmesh.event_log import event_logger
from kvmesh.identity.certificates import source_of
from kvmesh.identity.roles import MeshRole
from kvmesh.identity.secret import read_private
from kvmesh.lifecycle.process import raise_descriptor_limit
from kvmesh.network.names import LOOPBACK, is_loopback, registry_host
from kvmesh.network.place import check_protected, choose_address
from kvmesh.settings import SettingsError, load

_log = event_logger(__name__)
T = TypeVar("T")
WORKER_MODULES = ("services.prefill", "services.decode")
GREETING_TOKENS_MAX = 64


class Mesh:
    """The running processes of one `kvmesh up`."""

    def __init__(
        self,
        settings: UpSettings,
        *,
        place: MeshPlace,
        started_at_s: float,
        forked: Mapping[str, Forked],
        places: WorkerPlaces,
    ) -> None:
        self._settings = settings
        self._place = place
        self._forked = dict(forked)
        self._places = places
        self._progress = Progress(sys.stderr)
        self._started_at_s = started_at_s
        self._forks = WorkerForks(
            settings.registration,
            log_path=place.run_dir / "fork-server.log",
            timeout_s=settings.ready_timeout_s,
            say=self._progress.say,
        )
        self._scaling = ScalingPart()
        self._ports: Mapping[str, int] = {}
        """Flags of the ports that the frontend chose: a restarted one must be found where the first one was."""

    async def run(self) -> int:
        """Starts everything, serves, stops everything; the exit status."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop.set)
        stopped = asyncio.create_task(stop.wait())
        async with AsyncExitStack() as stack:
            stack.callback(stopped.cancel)
            if not await self._inputs_are_usable():
                return 2
            try:
                target = await self._start_registry(stack)
                registry = target.registry()
            except InvalidRequestError as error:
                self._progress.say(error.message)
                return 2
            stack.push_async_callback(registry.aclose)
            # It must outlive the workers' orderly stop.
            stack.push_async_callback(self._forks.aclose)
            keeper = self._keeper(registry)
            stack.push_async_callback(self._stop, keeper)
            folder = target.credentials.tls_directory(MeshRole.SCALER) if target.credentials is not None else ""
            scaler_address = await self._scaling.start(stack, source_of(folder)) if self._settings.plan else ""
            serving = asyncio.create_task(self._serve(target, scaler_address, keeper))
            # No child may be started while the others are stopped.
            stack.push_async_callback(_cancelled, serving)
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

    async def _inputs_are_usable(self) -> bool:
        """Returns whether the servers that the settings name answer. Says why not, before any process starts."""
        settings = self._settings
        problem = ""
        if is_hub_name(settings.model):
            problem = await hub_problem(settings.model, say=self._progress.say)
        if settings.consul and not problem:
            problem = await consul_problem(settings.consul, say=self._progress.say)
        if problem:
            self._progress.say(problem)
        return not problem

    async def _start_registry(self, stack: AsyncExitStack) -> MeshTarget:
        """Starts the registry, with credentials: given ones, or new ones in the mesh's own folder, whose certificates are renewed."""
        credentials, authority = own_credentials(self._settings, self._place.temporary / "credentials")
        if authority is not None:
            renewing = asyncio.create_task(keep_renewed(credentials, authority), name="renew-certificates")
            stack.callback(renewing.cancel)
        if self._settings.consul:
            return MeshTarget(address=self._settings.consul, credentials=credentials)
        token = read_private(credentials.token_file, field="credentials").decode()
        agent = EmbeddedAgent(
            AgentSettings(token=token, check_tls_directory=credentials.tls_directory(MeshRole.REGISTRY))
        )
        await agent.start()
        stack.push_async_callback(agent.aclose)
        return MeshTarget(address=agent.address, credentials=credentials)

    def _keeper(self, registry: Registry) -> Keeper:
        settings = self._settings
        return Keeper(
            registry=registry,
            clock=SystemClock(),
            policy=RestartPolicy(restarts_max=settings.restarts_max, window_s=settings.restart_window_s),
            say=self._progress.say,
            restart=self._restart,
        )

    async def _serve(self, target: MeshTarget, scaler_address: str, keeper: Keeper) -> int:
        """Runs until the mesh can no longer serve, or, with `once`, until the greeting is answered."""
        for line in self._places.lines:
            self._progress.say(line)
        inputs = MeshInputs(
            settings=self._settings,
            registry=target.address,
            places=self._places,
            credentials=target.credentials,
            scaler_address=scaler_address,
        )
        plan = plan_mesh(inputs)
        if self._settings.join:
            return await self._serve_joined(target, keeper, plan)
        ready = asyncio.create_task(self._become_ready(keeper.registry, plan))
        starting = asyncio.create_task(self._start_children(plan, keeper))
        try:
            await asyncio.wait({ready, starting}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                starting.result()
                dead = await _first_done(ready, wait_first_exit(keeper.processes()))
                if dead is not None:
                    # What cannot start now would not start on the next attempt either.
                    self._progress.say(
                        f"the mesh cannot start: {dead.spec.name} {dead.cause()}; log: {dead.spec.log_path}"
                    )
                    return 1
            if not (url := ready.result()):
                return 1
        finally:
            await _cancelled(starting)
            await _cancelled(ready)
        if scaler_address:
            self._progress.say(f"the planner acts; pools are sized through {scaler_address}")
            self._scaling.begin(keeper, keeper.groups[0], inputs, start=self._restart)
        try:
            return await self._serve_ready(target, keeper, url)
        finally:
            await self._scaling.end()

    async def _serve_joined(self, target: MeshTarget, keeper: Keeper, plan: MeshPlan) -> int:
        """Workers of another mesh: restarts those that die."""
        self._progress.say("starting " + ", ".join(spec.name for spec in plan.workers))
        watching = asyncio.create_task(self._show_loading(plan))
        try:
            await self._start_children(plan, keeper)
            if not await keeper.wait_registered(list(keeper.slots())):
                dead = await wait_first_exit(keeper.processes())
                self._progress.say(
                    f"the workers cannot start: {dead.spec.name} {dead.cause()}; log: {dead.spec.log_path}"
                )
                return 1
        finally:
            await _cancelled(watching)
        took_s = time.monotonic() - self._started_at_s
        self._progress.say(
            f"ready after {took_s:.1f} s: {len(plan.workers)} workers serve in the mesh with the registry {target.address}"
        )
        missing = await keeper.keep_running()
        self._progress.say(f"no {missing} is left here, and the registry lists no other: the workers end")
        return 1

    async def _serve_ready(self, target: MeshTarget, keeper: Keeper, url: str) -> int:
        """Restarts what dies while the mesh serves."""
        place = self._place
        credentials = str(target.credentials.folder) if target.credentials is not None else ""
        place.write_state(registry=target.address, url=url, credentials=credentials)
        self._progress.say(f"mesh {place.name}: registry {target.address}, logs in {place.run_dir}")
        self._progress.say(f"ready after {time.monotonic() - self._started_at_s:.1f} s: {url}")
        keeping = asyncio.create_task(keeper.keep_running())
        greeting = asyncio.create_task(self._greet(url))
        try:
            await asyncio.wait({keeping, greeting}, return_when=asyncio.FIRST_COMPLETED)
            if greeting.done():
                is_answered = greeting.result()
                if self._settings.once:
                    self._place.remove_state()
                    return 0 if is_answered else 1
            missing = await keeping
            self._progress.say(f"no {missing} is left here, and the registry lists no other: the mesh ends")
            return 1
        finally:
            await _cancelled(greeting)
            await _cancelled(keeping)

    async def _start_children(self, plan: MeshPlan, keeper: Keeper) -> None:
        """Workers are forked from one process that imported the engine, where that is slow; meanwhile the rest starts.

        Returns early when a worker dies before the next turn.
        """
        workers: list[Slot] = []
        keeper.groups.append(workers)
        importing = None
        if self._settings.registration.preload:
            importing = asyncio.create_task(self._forks.open())
        try:
            if importing is None:
                await self._start_group(plan.workers, workers, keeper, start=self._start)
            for specs in (plan.routers, plan.frontends, plan.planners):
                group: list[Slot] = []
                keeper.groups.append(group)
                await self._start_group(specs, group, keeper, start=self._start)
            if importing is not None:
                await importing
                for turn in plan.worker_turns:
                    if workers and not await keeper.wait_registered(workers):
                        return
                    await self._start_group(turn, workers, keeper, start=self._forks.start)
        finally:
            if importing is not None:
                await _cancelled(importing)

    async def _start_group(
        self, specs: Sequence[ChildSpec], group: list[Slot], keeper: Keeper, *, start: Start
    ) -> None:
        for spec in specs:
            spec.log_path.unlink(missing_ok=True)
            await keeper.start(spec, group, start)

    async def _start(self, spec: ChildSpec) -> Child:
        """Starts a child for the first time, in a waiting fork if there is one."""
        forked = self._forked.pop(spec.name, None)
        return await start_child(spec) if forked is None else forked.start(spec)

    async def _restart(self, spec: ChildSpec) -> Child:
        """Starts a child again. It appends to the log of the dead process."""
        if spec.module in WORKER_MODULES and self._settings.registration.preload:
            return await self._forks.start(spec)
        # By now this process has threads, so it must not fork.
        return await start_child(replace(spec, argv=with_ports(spec.argv, self._ports)))

    async def _become_ready(self, registry: Registry, plan: MeshPlan) -> str:
        """Waits for the frontend to have a model. Its URL; empty when that takes too long."""
        specs = [*plan.workers, *plan.routers, *plan.frontends, *plan.planners]
        names = [spec.name for spec in specs]
        awaited = [spec.name for spec in specs if not self._joins_later(spec)]
        waiting = self._progress.wait_ready(registry, names=names, awaited=awaited, started_at_s=self._started_at_s)
        limit_s = self._settings.ready_timeout_s
        watching = asyncio.create_task(self._show_loading(plan))
        try:
            frontend = await wait_while_it_goes_on(waiting, lambda: self._progress.lines, limit_s)
        except TimeoutError:
            self._progress.say(f"nothing happened for {limit_s:g} s; logs are in {self._place.run_dir}")
            return ""
        finally:
            watching.cancel()
        self._ports = {"--http-port": int(frontend.meta["http_port"])}
        if self._settings.frontend_processes == 1:
            self._ports["--rpc-port"] = frontend.port
        return http_url(frontend)

    async def _show_loading(self, plan: MeshPlan) -> None:
        """Says what each worker's engine does while it loads."""
        logs = {spec.name: LogWatch(spec.log_path) for spec in plan.workers}
        while True:
            for name, log in logs.items():
                for phase in log.new_phases():
                    self._progress.say(f"{name}: {phase}")
            await asyncio.sleep(POLL_S)

    def _joins_later(self, spec: ChildSpec) -> bool:
        """Decode workers answer alone until such prefill workers are registered."""
        return self._settings.registration.prefill_joins_late and spec.module == "services.prefill"

    async def _greet(self, url: str) -> bool:
        """Asks the greeting; False when it was not answered."""
        settings = self._settings
        try:
            model = await _first_model(url)
            print(curl_line(url, model=model, has_key=bool(settings.api_key)), flush=True)
            if not settings.greeting:
                return True
            print(f"\n> {settings.greeting}", flush=True)
            messages = [{"role": "user", "content": settings.greeting}]
            await stream_answer(
                url,
                model=model,
                messages=messages,
                since_s=self._started_at_s,
                api_key=settings.api_key,
                max_tokens=GREETING_TOKENS_MAX,
            )
            print(flush=True)
            if settings.registration.name == "simulated":
                self._progress.say("the simulated engine makes up these words; it computes no model")
        except UnauthenticatedError as error:
            # The frontend's settings require a key.
            self._progress.say(error.message)
            print(flush=True)
        except (MeshError, aiohttp.ClientError, TimeoutError) as error:
            self._progress.say(f"the greeting was not answered: {error or type(error).__name__}")
            return False
        except OSError:
            # `kvmesh up | head`, or output to a full disk: the answer cannot be printed, but the mesh serves.
            discard(sys.stdout)
        return True

    async def _stop(self, keeper: Keeper) -> None:
        """Stops frontends first, so that no request is accepted that cannot be finished, and workers last."""
        self._progress.say("stopping")
        self._place.remove_state()
        await stop_children(list(reversed(keeper.running())), self._settings.stop_timeout_s)


async def _first_done(first: "asyncio.Task[Any]", other: Coroutine[Any, Any, T]) -> T | None:
    """Returns what `other` returns, or None when `first` is done before it."""
    task = asyncio.create_task(other)
    try:
        await asyncio.wait({first, task}, return_when=asyncio.FIRST_COMPLETED)
        return None if first.done() else task.result()
    finally:
        await _cancelled(task)


async def _cancelled(task: "asyncio.Task[Any]") -> None:
    """Cancels a task and waits for its end, whatever that is."""
    task.cancel()
    await asyncio.wait({task})


def fork_services(settings: UpSettings) -> Mapping[str, Forked]:
    """Returns a waiting process for each service by its name; none: they are started as programs of their own."""
    # An engine with a preload takes longest to import and must begin first, in a fork server of its own.
    if not settings.fork or settings.registration.preload:
        return {}
    plan = plan_mesh(MeshInputs(settings=settings, registry=""))
    specs = (*plan.workers, *plan.routers, *plan.frontends, *plan.planners)
    return fork_all([spec.name for spec in specs], [f"{spec.module}.__main__" for spec in specs])


def worker_places(settings: UpSettings) -> WorkerPlaces:
    """Returns the devices of workers whose engine is installed in its CUDA build. InvalidRequestError when the workers do not fit."""
    engine = settings.registration
    if engine.gpu is None:
        return WorkerPlaces()
    build = installed_build(engine.gpu)
    driver = read_driver()
    if build != "gpu":
        count = len(driver.devices)
        line = (
            f"{count} NVIDIA GPUs are here and {engine.title}'s CPU build is installed:"
            " KVMESH_ENGINE_BUILD=gpu make up uses them"
        )
        return WorkerPlaces(lines=[line] if count else [])
    return place_on_gpus(
        engine,
        driver,
        worker_groups(settings),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        has_order="CUDA_DEVICE_ORDER" in os.environ,
        workers_per_device=settings.workers_per_gpu,
        model=Path(settings.model).expanduser(),
    )


async def _first_model(url: str) -> str:
    """Asked where no key is needed."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        body = await response.json()
    return str(body["models"][0])


def curl_line(url: str, model: str, *, has_key: bool = False) -> str:
    """Returns a line to paste into a shell."""
    body = f'{{"model":"{model}","stream":true,"messages":[{{"role":"user","content":"Hello!"}}]}}'
    key = ' -H "authorization: Bearer $KVMESH_API_KEY"' if has_key else ""
    return f"\ncurl -N {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"


def main(argv: Sequence[str]) -> int:
    started_at_s = time.monotonic()
    try:
        settings = load(UpSettings, argv=argv, environ=os.environ, program="kvmesh up", description=__doc__ or "")
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    settings, lines = adapt_to_packages(settings)
    try:
        if problem := engine_problem(settings.registration.name) or model_problem(settings.model):
            raise InvalidRequestError(problem)
        if settings.join:
            settings = joined(settings)
        chosen = choose_address(settings.address, registry=registry_host(settings.consul) or LOOPBACK)
        if not is_loopback(chosen.host):
            settings = replace(settings, address=chosen.host)
            if not settings.insecure_listen:
                check_protected(chosen.host, has_tls=has_mesh_tls(settings))
            lines = [*lines, f"services listen on {chosen.host}: {chosen.why}"]
        if not settings.join and (
            problem := port_problems(settings.host or chosen.host, settings.port, settings.grpc_port)
        ):
            raise InvalidRequestError(problem)
        places = worker_places(settings)
        places = replace(places, lines=[*lines, *places.lines])
        name = settings.name or default_name(settings.port)
        with claim_place(name, run_dir=settings.run_dir, is_joined=bool(settings.join)) as place:
            return _run(replace(settings, run_dir=str(place.run_dir)), place, places, started_at_s=started_at_s)
    except MeshError as error:
        print(f"kvmesh: {error.message}", file=sys.stderr)
        return 2


def joined(settings: UpSettings) -> UpSettings:
    """Returns the settings with the registry of the mesh that the workers join, and with its credentials if it runs on this machine.

    NotFoundError lists the meshes of this machine.
    """
    settings = replace(settings, planner=False, plan=False)
    if ":" in settings.join:
        return replace(settings, consul=settings.join)
    mesh = find_mesh(settings.join, otherwise="--join ADDRESS")
    return replace(settings, consul=mesh.registry, credentials=settings.credentials or mesh.credentials)


def _run(settings: UpSettings, place: MeshPlace, places: WorkerPlaces, *, started_at_s: float) -> int:
    """Runs the mesh in its place."""
    if place.note:
        places = replace(places, lines=[place.note, *places.lines])
    # Sockets and other temporary files of all processes go to one folder, which is removed however this process ends.
    os.environ["TMPDIR"] = tempfile.tempdir = str(place.temporary)
    # What torch compiles is for later meshes too.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvmesh" / "torchinductor"
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    raise_descriptor_limit()  # For the registry and for all services, which inherit the environment.
    os.umask(0o077)  # Logs, state and sockets of all processes are for this user only.
    log_path = place.run_dir / "up.log"
    log_path.unlink(missing_ok=True)
    try:
        forked = fork_services(settings)
        # After the forks, which configure logging themselves.
        logging.raiseExceptions = False  # A full disk must not print tracebacks on the terminal.
        logging.basicConfig(filename=log_path, filemode="w", format="%(asctime)s %(levelname)s %(name)s %(message)s")
        if settings.fork and not forked and not settings.registration.preload:
            # Each service then imports everything itself: a slower start and more memory.
            _log.warning("services_not_forked")
        mesh = Mesh(settings, place=place, started_at_s=started_at_s, forked=forked, places=places)
        return asyncio.run(mesh.run())
    except Exception as error:  # noqa: BLE001  # The log has the traceback, the terminal one line.
        _log.error("up_failed", exc_info=error)
        print(f"kvmesh: kvmesh up failed: {type(error).__name__}: {error}; log: {log_path}", file=sys.stderr)
        return 1
