"""The fork server with real processes, without slow imports."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.engines.vllm.registration import VLLM
from kvmesh.errors import UnavailableError
from kvmesh.worker import fork_loop, fork_server
from kvmesh.worker.fork_server import THREADS, ForkServer
from tests.integration.mesh import is_running
from tests.parts import require_part
from tests.patience import PATIENCE_S

SCRIPT = """
import os, random, signal, sys, time
if __name__ == "__main__":
    word = sys.argv[1]
    print(word, sys.argv[0], os.environ.get("COLOUR"), os.environ.get("GONE"), random.random(), flush=True)
    if word == "exit":
        sys.exit(int(sys.argv[2]))
    if word == "raise":
        raise ValueError("no good")
    if word == "text":
        sys.exit("a last word")
    if word == "sleep":
        time.sleep(600)
    if word == "group":
        print(os.getpid() == os.getsid(0) == os.getpgrp(), signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)
"""


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[ForkServer]:
    (tmp_path / "forked_script.py").write_text(SCRIPT)
    server = await ForkServer.start("", env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}", "GONE": "still there"})
    yield server
    await server.aclose()


async def run(server: ForkServer, log: Path, *argv: str) -> int:
    child = await server.spawn("forked_script", argv, env={"COLOUR": "red", "GONE": None}, log=str(log))
    async with asyncio.timeout(PATIENCE_S):
        return await server.wait(child)


@pytest.mark.parametrize(
    ("argv", "status", "text"),
    [
        (("exit", "0"), 0, "exit"),
        (("exit", "7"), 7, "exit"),
        (("raise",), 1, "ValueError: no good"),
        (("text",), 1, "a last word"),
        (("group",), 0, "True True"),
    ],
)
async def test_a_child_runs_as_a_main_module(
    server: ForkServer, tmp_path: Path, argv: tuple[str, ...], status: int, text: str
) -> None:
    """Arguments, environment, output and exit status are as with `python -m`. The child leads its own session."""
    log = tmp_path / "log"
    assert await run(server, log, *argv) == status
    written = log.read_text()
    assert text in written
    assert " red None " in written
    assert "forked_script" in written.split()[1]


async def test_children_draw_their_own_random_numbers(server: ForkServer, tmp_path: Path) -> None:
    """Without reseeding, forked children would share the generator's state."""
    logs = [tmp_path / f"log-{number}" for number in range(3)]
    for log in logs:
        await run(server, log, "exit", "0")
    assert len({log.read_text().split()[4] for log in logs}) == 3


async def test_signals_reach_a_child_and_are_reported(server: ForkServer, tmp_path: Path) -> None:
    """A negative status is the signal. A second signal to a dead child does nothing."""
    child = await server.spawn("forked_script", ["sleep"], log=str(tmp_path / "log"))
    child.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):
        assert await server.wait(child) == -signal.SIGTERM
    child.send_signal(signal.SIGTERM)


async def test_children_die_with_the_server(server: ForkServer, tmp_path: Path) -> None:
    """If the server is killed, its children die and later calls are refused."""
    children = [await server.spawn("forked_script", ["sleep"], log=str(tmp_path / "log")) for _ in range(3)]
    server._process.kill()
    async with asyncio.timeout(PATIENCE_S):
        for child in children:
            assert await server.wait(child) == -signal.SIGKILL
            while is_running(child.pid):
                await asyncio.sleep(0.01)
    with pytest.raises(UnavailableError):
        await server.spawn("forked_script", ["exit", "0"])


async def test_closing_ends_children_and_server(server: ForkServer, tmp_path: Path) -> None:
    """No child, server or socket remains. Closing again does nothing."""
    child = await server.spawn("forked_script", ["sleep"], log=str(tmp_path / "log"))
    await server.aclose()
    async with asyncio.timeout(PATIENCE_S):
        while is_running(child.pid):
            await asyncio.sleep(0.01)
    await server.aclose()
    assert not os.path.exists(server._folder.name)  # noqa: ASYNC240  # A test may wait for a disk.


async def test_a_server_that_ends_when_its_time_is_over_is_closed(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has ended when it should be killed. The socket is removed nevertheless."""
    wait = server._process.wait

    async def time_is_over_at_the_end() -> int:
        monkeypatch.setattr(server._process, "wait", wait)
        await wait()
        raise TimeoutError

    monkeypatch.setattr(server._process, "wait", time_is_over_at_the_end)
    await server.aclose()
    assert not os.path.exists(server._folder.name)  # noqa: ASYNC240  # A test may wait for a disk.


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_threads_that_end_while_they_are_listed_do_not_count(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """A thread may end before the kernel opens its file, or before it reads the file."""
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, daemon=True)
    thread.start()
    assert fork_loop.other_threads()

    def end(path: Path) -> str:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", end)
        assert fork_loop.other_threads() == []
    ends.set()
    thread.join()


@pytest.mark.parametrize("preload", ["no.such.module:function", "threading:no_such_function"])
async def test_a_failed_preload_is_reported(preload: str) -> None:
    """The start fails with an error instead of hanging."""
    with pytest.raises(UnavailableError):
        await ForkServer.start(preload)


async def test_a_preload_that_starts_threads_is_refused(tmp_path: Path) -> None:
    """A fork would copy the locks of the threads but not the threads."""
    code = (
        "import threading, time\ndef go():\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    (tmp_path / "threaded.py").write_text(code)
    with pytest.raises(UnavailableError) as caught:
        await ForkServer.start("threaded:go", env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"})
    assert caught.value.reason == THREADS
    assert "the imports started threads (python" in caught.value.message


@pytest.mark.parametrize("ends", ["refused", "cancelled"])
async def test_a_start_that_fails_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """When `start` raises, the process has ended and is reaped. The process would not end by itself."""
    started: list[asyncio.subprocess.Process] = []
    create = asyncio.create_subprocess_exec

    async def create_and_record(*argv: Any, **options: Any) -> asyncio.subprocess.Process:
        started.append(await create(*argv, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_and_record)
    monkeypatch.setattr(fork_server, "STOP_TIMEOUT_S", PATIENCE_S)
    words = "print('threads: python', flush=True); " if ends == "refused" else ""
    (tmp_path / "sleeping.py").write_text(f"import time\ndef go():\n    {words}time.sleep(600)\n")
    starting = asyncio.create_task(
        ForkServer.start("sleeping:go", env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}, timeout_s=PATIENCE_S)
    )
    async with asyncio.timeout(PATIENCE_S):
        while not started:
            await asyncio.sleep(0.001)
    if ends == "cancelled":
        starting.cancel()
    await asyncio.wait([starting])
    assert started[0].returncode == -signal.SIGKILL
    assert starting.cancelled() or isinstance(starting.exception(), UnavailableError)


@pytest.mark.vllm
@pytest.mark.timeout(300)
async def test_the_users_thread_counts_do_not_end_the_fork_server(tmp_path: Path) -> None:
    """torch starts threads when it is loaded, as many as these variables say. A child uses OMP_NUM_THREADS threads, or one without it."""
    require_part("vllm")
    code = "import os, sys\nfrom kvmesh.engines.vllm.environment import set_defaults, use_thread_count\n"
    code += "set_defaults()\nuse_thread_count()\n"
    code += "print(os.environ['OPENBLAS_NUM_THREADS'], sys.modules['torch'].get_num_threads())\n"
    (tmp_path / "counting.py").write_text(code)
    counts = {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2"}
    server = await ForkServer.start(VLLM.preload, env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}", **counts})
    for name, env, text in (("set", {}, "2 3\n"), ("absent", {"OMP_NUM_THREADS": None}, "2 1\n")):
        log = tmp_path / name
        async with asyncio.timeout(240):
            assert await server.wait(await server.spawn("counting", env=env, log=str(log))) == 0
        assert log.read_text() == text
    await server.aclose()
