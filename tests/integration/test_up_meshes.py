"""Several `kvmesh up` on one machine, and their terminal output on errors. Real processes, simulated engines."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.integration.mesh import ROOT, argv_simulated, descendants, is_running
from tests.patience import PATIENCE_S

SMALL = ("--prefill", "0", "--no-planner")


class Terminal:
    """Runs `kvmesh` commands in their own directory, with their own temporary directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "t"
        self.temporary.mkdir()
        self.running: list[asyncio.subprocess.Process] = []
        clean = {name: value for name, value in os.environ.items() if name != "KVMESH_STATE"}
        self.env = {**clean, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}

    async def start(self, *argv: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvmesh.cli", *argv),
            cwd=self.folder,
            env=self.env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self.running.append(process)
        return process

    async def run(self, *argv: str, typed: str = "") -> tuple[int | None, str]:
        """Returns the exit status and the output. `typed` is the input."""
        process = await self.start(*argv)
        output, _ = await asyncio.wait_for(process.communicate(typed.encode()), PATIENCE_S)
        return process.returncode, output.decode()

    async def up(self, *argv: str) -> tuple[asyncio.subprocess.Process, list[str]]:
        """Starts a mesh. Returns it once it is ready, and the lines that it printed so far."""
        process = await self.start("up", "--port", "0", "--greeting", "", *argv_simulated(*argv))
        assert process.stdout is not None
        lines: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            while not any("ready after" in line and "http" in line for line in lines):
                line = await process.stdout.readline()
                assert line, lines
                lines.append(line.decode())
        return process, lines


@pytest.fixture
async def terminal(tmp_path: Path) -> AsyncIterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    for process in terminal.running:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.communicate(), PATIENCE_S)


async def test_meshes_have_names(terminal: Terminal) -> None:
    """The second mesh in one directory gets a number and reports it. Commands list the meshes and accept `--mesh`. Killed meshes leave no
    process, and nothing in the temporary directory."""
    mesh, first = await terminal.up(*SMALL)
    name = terminal.folder.name
    assert any(f"mesh {name}: registry http://127.0.0.1:" in line for line in first)
    status, only = await terminal.run("status")
    assert status == 0 and "decode" in only
    other, second = await terminal.up(*SMALL)
    assert any(f"a mesh named {name} runs already; this one is {name}-2" in line for line in second)
    status, listed = await terminal.run("status")
    assert (
        status == 0 and f"\n{name} " in listed and f"\n{name}-2 " in listed and "choose one with --mesh NAME" in listed
    )
    status, shown = await terminal.run("status", "--mesh", f"{name}-2")
    assert status == 0 and "decode" in shown
    status, words = await terminal.run("chat", "--mesh", name, typed="/help\n/wibble\n")
    assert status == 0 and "Ctrl-C     stop an answer" in words and "no such command: /wibble" in words
    for command in (("chat",), ("explain", "x")):
        status, words = await terminal.run(*command)
        assert status == 1 and "2 meshes run here; choose one with --mesh NAME" in words
    assert (terminal.folder / "run" / name / "decode-0.log").exists()
    assert (terminal.folder / "run" / f"{name}-2" / "decode-0.log").exists()
    await check_join(terminal, mesh, name)
    children = [*descendants(mesh.pid), *descendants(other.pid)]
    assert len(children) >= 4
    for process in (mesh, other):
        process.kill()
        # The process that cleans up keeps the output open.
        await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert not any(terminal.temporary.iterdir())
    async with asyncio.timeout(PATIENCE_S):
        while any(map(is_running, children)):
            await asyncio.sleep(0.05)


async def check_join(terminal: Terminal, mesh: asyncio.subprocess.Process, name: str) -> None:
    """Joins the mesh by its name: only workers start, they serve in that mesh, and they leave it without ending it."""
    joined, lines = await terminal.up("--join", name, "--prefill", "0", "--decode", "2")
    assert not any("router" in line or "gateway" in line for line in lines)

    async def decode_workers() -> int:
        status, shown = await terminal.run("status", "--mesh", name)
        assert status == 0, shown
        return sum(line.startswith("decode-") for line in shown.splitlines())

    async with asyncio.timeout(PATIENCE_S):
        while await decode_workers() != 3:
            pass
    joined.send_signal(signal.SIGINT)
    await asyncio.wait_for(joined.communicate(), PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while await decode_workers() != 1:
            pass
    assert joined.returncode == 0 and mesh.returncode is None
    status, words = await terminal.run("up", "--join", "no-such-mesh", *argv_simulated())
    assert status == 2 and name in words


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--engine-args=--wibble"), "--wibble is unknown"),
        (("--policy=wibble"), "no policy is named 'wibble'"),
        (("--frontend-args=--http-port=70000"), "--http-port"),
    ],
)
async def test_a_process_that_cannot_start_is_reported_in_one_line(terminal: Terminal, flags: str, words: str) -> None:
    """The line has the process, the cause and the log's path. There is no stack trace and no JSON."""
    status, output = await terminal.run("up", "--port", "0", "--engine", "simulated", flags)
    assert status == 1
    (line,) = [line for line in output.splitlines() if "the mesh cannot start" in line]
    assert words in line and "-0 (pid " in line and line.endswith(".log")
    assert "Traceback" not in output and '{"' not in output


async def test_inputs_are_checked_before_anything_starts(terminal: Terminal) -> None:
    """Checks the port, and names the process that uses it, and the model's directory."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        status, output = await terminal.run("up", "--port", str(port))
    assert (status, output.count("\n")) == (2, 1)
    assert f"port {port} is taken by PID {os.getpid()} (" in output and "; use --port" in output
    status, output = await terminal.run("up", "--port", "0", "--model", "/nowhere")
    assert (status, output) == (2, "kvmesh: the model directory /nowhere does not exist\n")
    assert not any(terminal.temporary.iterdir())


async def test_the_greeting_of_a_simulated_engine_is_marked_as_random(terminal: Terminal) -> None:
    """So that new users do not mistake it for a broken model. The mesh leaves no temporary files."""
    status, output = await terminal.run("up", "--port", "0", "--once", *argv_simulated("--greeting", "Hello!", *SMALL))
    assert status == 0 and "the simulated engine makes up these words; it computes no model" in output
    assert not any(terminal.temporary.iterdir())


async def test_version(terminal: Terminal) -> None:
    """Prints the versions of kvmesh and Python."""
    status, output = await terminal.run("--version")
    assert status == 0 and output.startswith("kvmesh ") and ", Python 3." in output


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    ("open_output", "is_stderr_too"),
    [(closed_pipe, False), (closed_pipe, True), (lambda: os.open("/dev/full", os.O_WRONLY), True)],
    ids=["pipe", "both", "full"],
)
async def test_unwritable_output_causes_no_error(
    terminal: Terminal, open_output: Callable[[], int], is_stderr_too: bool
) -> None:
    """`kvmesh up | head`, `kvmesh up 2>&1 | head`, `kvmesh up >& FILE` on a full disk: the mesh starts, serves and stops normally.

    No log has a stack trace.
    """
    writing = open_output()
    words = ("up", "--port", "0", "--once", "--run-dir", "run", *argv_simulated(*SMALL))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", *words),
        cwd=terminal.folder,
        env=terminal.env,
        stdout=writing,
        stderr=writing if is_stderr_too else asyncio.subprocess.PIPE,
    )
    os.close(writing)
    terminal.running.append(process)
    _, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    logs = {path.name: path.read_text() for path in (terminal.folder / "run").glob("*.log")}
    assert process.returncode == 0, (err, logs)
    assert "gateway-0.log" in logs
    for text in ((err or b"").decode(), *logs.values()):
        assert not any(word in text for word in ("Traceback", "Logging error", "BrokenPipe", "Broken pipe")), text[
            -2000:
        ]
