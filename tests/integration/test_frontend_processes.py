"""Several frontend processes on one port: connections spread over them, a dead process is replaced, and all end together."""

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from kvmesh.cli.connection import MeshTarget
from kvmesh.clock import SystemClock
from kvmesh.discovery.base import FRONTEND, Instance
from kvmesh.errors import InternalError
from kvmesh.lifecycle import Supervisor, SupervisorSettings
from services.frontend.processes import process_command, reserved_port
from services.frontend.settings import FrontendSettings, HttpSettings
from tests.integration.mesh import ROOT, argv_simulated, metrics_text, running_mesh, wait_until, worker_metric
from tests.patience import PATIENCE_S

BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
RESTART_TIMEOUT_S = PATIENCE_S


async def instances(target: MeshTarget) -> list[Instance]:
    """Returns the frontends that take requests."""
    registry = target.registry()
    try:
        async for view in registry.watch(FRONTEND):
            return [instance for instance in view.instances if instance.takes_requests]
    finally:
        await registry.aclose()
    raise AssertionError("a watch never ends by itself")


async def served(instance: Instance) -> float:
    """Returns the number of chat requests that a process has answered, from its own metrics."""
    text = await metrics_text(instance.host, int(instance.meta["metrics_port"]))
    return worker_metric(text, "kvmesh_frontend_requests_total")


async def ask(url: str) -> int | str:
    """Sends a request on a new connection. Returns the status, or the error of the connection."""
    connector = aiohttp.TCPConnector(force_close=True)
    try:
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(f"{url}/v1/chat/completions", json=BODY) as response,
        ):
            await response.read()
            return response.status
    except aiohttp.ClientError as error:
        return repr(error)


async def test_two_processes_share_a_port(tmp_path: Path) -> None:
    """Both processes answer. If one is killed, only its requests in flight fail, and a new process replaces it."""
    # If a busy machine delays one decode worker, the other one answers.
    workers = ("--prefill", "0", "--decode", "2", "--engine-args=--simulated-time-factor 0")
    flags = argv_simulated(*workers, "--frontend-processes", "2")
    async with running_mesh(tmp_path, *flags) as mesh:

        async def both() -> bool:
            return len(await instances(mesh.target)) == 2

        await wait_until(both, PATIENCE_S, "both register")
        first, second = await instances(mesh.target)
        assert first.meta["http_port"] == second.meta["http_port"] == mesh.url.rpartition(":")[2]
        assert first.port != second.port
        assert first.meta["metrics_port"] != second.meta["metrics_port"]
        # The second process may still load the model.
        await wait_until(lambda: _all_ok(mesh.url), PATIENCE_S, "both answer")
        before = [await served(first), await served(second)]
        assert [await ask(mesh.url) for _ in range(60)] == [200] * 60
        after = [await served(first), await served(second)]
        spread = [now - then for now, then in zip(after, before, strict=True)]
        assert sum(spread) == 60
        assert min(spread) >= 10, spread

        victim = int(first.instance_id.rpartition("-")[2])
        assert victim in mesh.pids("frontend.shared_port")
        stop = asyncio.Event()
        answers: list[tuple[int | str, float]] = []
        clients = [asyncio.create_task(_ask_until(mesh.url, stop, answers)) for _ in range(4)]
        await wait_until(lambda: len(answers) >= 8, PATIENCE_S, "the clients are answered")
        os.kill(victim, signal.SIGKILL)
        # On a busy machine the kernel may take a while to end the process. Until then its sockets accept connections that get no answer.
        await wait_until(lambda: not _exists(victim), PATIENCE_S, "the killed process is gone")
        gone_s = time.monotonic()
        await wait_until(
            lambda: sum(at_s > gone_s for _, at_s in answers) >= 8, PATIENCE_S, "the clients are answered again"
        )
        stop.set()
        await asyncio.gather(*clients)
        failed = [(answer, at_s - gone_s) for answer, at_s in answers if answer != 200]
        # `at_s`: when the request was sent. All requests sent after the process had ended are answered.
        assert all(at_s <= 0 for _, at_s in failed), failed

        async def replaced() -> bool:
            ids = {instance.instance_id for instance in await instances(mesh.target)}
            return second.instance_id in ids and bool(ids - {first.instance_id, second.instance_id})

        await wait_until(replaced, RESTART_TIMEOUT_S, "a new one registers")
        assert await _all_ok(mesh.url)


async def _all_ok(url: str) -> bool:
    return all(status == 200 for status in [await ask(url) for _ in range(16)])


async def _ask_until(url: str, stop: asyncio.Event, answers: list[tuple[int | str, float]]) -> None:
    while not stop.is_set():
        sent_s = time.monotonic()
        answers.append((await ask(url), sent_s))


def _exists(pid: int) -> bool:
    """Whether the process exists. It does until its parent has waited for it, which requires that all its threads have ended: those of a
    zombie may still hold its sockets."""
    return Path(f"/proc/{pid}").exists()


def test_a_port_in_use_is_refused() -> None:
    """Also a port of another set of processes, with which the kernel would share it."""
    with reserved_port("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()
            with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port}"):
                reserved_port("127.0.0.1", port)


def test_each_process_has_its_own_names_and_ports() -> None:
    """Each process gets its own instance id, and keeps the other flags."""
    settings = FrontendSettings(instance_id="f", http=HttpSettings(port=0))
    argv = process_command(settings, ["--instance-id", "f", "--processes", "3"], number=2, port=8123)
    assert argv[1:6] == ["-m", "services.frontend.shared_port", "--instance-id", "f", "--processes"]
    assert argv[-4:] == ["--http-port", "8123", "--instance-id", "f-2"]


def child(code: str) -> list[str]:
    """Returns the command of a process that runs Python code."""
    return [sys.executable, "-c", code]


def is_alive(pid: int) -> bool:
    """Whether the process exists, also as a zombie."""
    return os.path.exists(f"/proc/{pid}")


async def run_supervisor(supervisor: Supervisor) -> tuple["asyncio.Task[None]", asyncio.Event, asyncio.Event]:
    stop, hurry = asyncio.Event(), asyncio.Event()
    return asyncio.create_task(supervisor.run(stop=stop, hurry=hurry)), stop, hurry


async def test_the_supervisor_restarts_dead_processes_and_stops_all() -> None:
    """At the end the supervisor stops every process and waits for it."""
    sleeper = child("import time; time.sleep(60)")
    fast = SupervisorSettings(restart_min_s=0.01, steady_s=0.1)
    supervisor = Supervisor([sleeper, sleeper], clock=SystemClock(), stop_timeout_s=25, settings=fast)
    task, stop, _ = await run_supervisor(supervisor)
    await wait_until(lambda: all(supervisor.statistics().running), PATIENCE_S, "both run")
    first, second = supervisor.statistics().running
    await asyncio.sleep(0.15)
    os.kill(first, signal.SIGKILL)
    await wait_until(lambda: supervisor.statistics().running[0] not in (0, first), PATIENCE_S, "a new one runs")
    assert supervisor.statistics().running[1] == second
    assert supervisor.statistics().restarts == 1
    pids = supervisor.statistics().running
    stop.set()
    await asyncio.wait_for(task, PATIENCE_S)
    assert not any(map(is_alive, pids))


async def test_the_supervisor_kills_processes_that_ignore_sigterm(tmp_path: Path) -> None:
    """It kills them after the stop timeout, and not before."""
    up = tmp_path / "up"
    stubborn = child(
        f"import pathlib, signal, time; signal.signal(15, signal.SIG_IGN); pathlib.Path({str(up)!r}).touch(); time.sleep(60)"
    )
    supervisor = Supervisor([stubborn], clock=SystemClock(), stop_timeout_s=0.5)
    task, stop, _ = await run_supervisor(supervisor)
    await wait_until(up.exists, PATIENCE_S, "it runs and ignores SIGTERM")
    (pid,) = supervisor.statistics().running
    stop.set()
    began_s = time.monotonic()
    await asyncio.wait_for(task, PATIENCE_S)
    assert time.monotonic() - began_s >= 0.45
    assert not is_alive(pid)


async def test_the_supervisor_gives_up_when_all_processes_die() -> None:
    """A wrong flag must not lead to endless restarts. The supervisor fails with InternalError."""
    hopeless = SupervisorSettings(restart_min_s=0.01, restart_max_s=0.02, steady_s=PATIENCE_S, deaths_max=3)
    supervisor = Supervisor([child("raise SystemExit(2)")], clock=SystemClock(), stop_timeout_s=1, settings=hopeless)
    task, _, _ = await run_supervisor(supervisor)
    with pytest.raises(InternalError, match="3 processes died"):
        await asyncio.wait_for(task, PATIENCE_S)


async def test_a_wrong_setting_ends_the_program(tmp_path: Path) -> None:
    """The program validates its settings once, before it starts any process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.frontend", "--processes", "2", "--http-port", "99999999"),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    _, problems = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert b"http-port" in problems
