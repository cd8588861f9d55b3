"""Child processes of `kvmesh up`: starts, watches and stops them. No child outlives this process."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvmesh.cli.log_tail import failure_line, log_tail
from kvmesh.worker.fork_server import ForkedChild, ForkServer


class Process(Protocol):
    """A running child process. One implementation per way to start it."""

    pid: int

    async def wait(self) -> int:
        """Waits for the end. Returns the exit status; minus the signal's number if a signal ended it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """A child to start: `python -m module argv`. Its output goes to `log_path`."""

    name: str
    module: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path


class Child:
    """One running child. `exited` is set when its process has ended."""

    def __init__(self, spec: ChildSpec, process: Process) -> None:
        self.spec = spec
        self.pid = process.pid
        self.status: int | None = None
        self.exited = asyncio.Event()
        self._waiter = asyncio.create_task(self._wait(process), name=f"child-{spec.name}")

    async def _wait(self, process: Process) -> None:
        self.status = await process.wait()
        self.exited.set()

    def cause(self) -> str:
        """Returns why it ended, as words that follow its name: the signal, or the status and the log line with the failure."""
        status = self.status
        if status is not None and status > 0 and (line := failure_line(log_tail(self.spec.log_path))):
            return f"(pid {self.pid}) {self._how()} ({line})"
        return f"(pid {self.pid}) {self._how()}"

    def _how(self) -> str:
        status = self.status
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    def signal_nowait(self, number: int) -> None:
        """Sends a signal. Does nothing if the child has ended."""
        if not self.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def stop(self, timeout_s: float) -> None:
        """Sends SIGTERM and waits for the end. Kills the child after `timeout_s`."""
        self.signal_nowait(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.exited.wait()
        except TimeoutError:
            self.signal_nowait(signal.SIGKILL)
            await self.exited.wait()


async def start_child(spec: ChildSpec) -> Child:
    """Starts a child with a new Python interpreter. It gets KVMESH_PARENT_PID and dies with this process."""
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    with spec.log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            spec.module,
            *spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **spec.env, "KVMESH_PARENT_PID": str(os.getpid())},
            start_new_session=True,
        )
    return Child(spec, process)


class _Forked:
    """Implements Process for a child of a fork server."""

    def __init__(self, server: ForkServer, child: ForkedChild) -> None:
        self.pid = child.pid
        self._server = server
        self._child = child

    async def wait(self) -> int:
        return await self._server.wait(self._child)


async def fork_child(server: ForkServer, spec: ChildSpec) -> Child:
    """Starts a child as a fork of the server, which has finished the slow imports."""
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    forked = await server.spawn(spec.module, spec.argv, env=dict(spec.env), log=str(spec.log_path))
    return Child(spec, _Forked(server, forked))


async def stop_children(groups: Sequence[Sequence[Child]], timeout_s: float) -> None:
    """Stops the groups one after the other, and the children of one group concurrently."""
    for group in groups:
        await asyncio.gather(*(child.stop(timeout_s) for child in group))


async def wait_first_exit(children: Sequence[Child]) -> Child:
    """Waits until a child ends, and returns it."""
    tasks = {asyncio.create_task(child.exited.wait()): child for child in children}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[next(iter(done))]
    finally:
        for task in tasks:
            task.cancel()
