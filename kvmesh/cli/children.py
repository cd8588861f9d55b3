"""Child processes of `kvmesh up`: starts, watches and stops them, and finds the line of a log that explains why one ended. No child outlives
this process."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvmesh.engines.registration import EngineRegistration
from kvmesh.errors import UnavailableError
from kvmesh.worker.fork_server import THREADS, ForkedChild, ForkServer

LINES = 200
BYTES_MAX = 256 << 10
CHARACTERS_MAX = 300
_EXCEPTION = re.compile(
    r"^(?:\([^)]*\)\s*)?(?:ERROR [^\]]*\]\s*)?([\w.]*(?:Error|Exception|Interrupt|Exit)\b(?:: .*)?)$"
)
"""Matches the last line of a traceback, also after the prefixes of vLLM's log."""
_VAGUE = re.compile(
    r"Engine core initialization failed|See (?:root cause|stack trace) above|--help` lists all settings"
)
"""Messages that only refer to an earlier one."""


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
        # Kept here, because asyncio has only weak references to tasks.
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
            # A terminal's Ctrl-C is for this process, which stops children in order.
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


def log_tail(path: Path) -> Sequence[str]:
    """Returns the last lines of a file; none if it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - BYTES_MAX))
        return file.read().decode(errors="replace").splitlines()[-LINES:]
    return ()


def failure_line(lines: Sequence[str]) -> str:
    """Returns the line that names the failure: the last line for people, else the newest exception or event at level error."""
    found = [text for line in lines if (text := _text(line)) and not _VAGUE.search(text[0])]
    if not found:
        return ""
    last = found[-1][0]
    failures = [text for text, is_failure in found if is_failure]
    has_last_words = not lines[-1].startswith("{") and "Warning" not in last
    return (last if has_last_words or not failures else failures[-1])[:CHARACTERS_MAX]


def _text(line: str) -> tuple[str, bool] | None:
    """Returns a line for people, and whether it names a failure. None: a frame of a traceback, or nothing."""
    if line.startswith("{"):
        with suppress(ValueError, AttributeError):
            event = json.loads(line)
            cause = event.get("error") or event.get("detail") or ""
            text = f"{event.get('event', '')}: {cause}" if cause else str(event.get("event", ""))
            return text, event.get("level") in ("error", "critical")
    if found := _EXCEPTION.match(line.strip()):
        return found[1], True
    if not line.strip() or line.startswith((" ", "Traceback ")):
        return None
    return line.strip(), False


class WorkerForks:
    """Starts workers. If the imports start threads, forking is not safe, and each worker starts with a new interpreter."""

    def __init__(
        self, engine: EngineRegistration[Any], *, log_path: Path, timeout_s: float, say: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._log_path = log_path
        self._timeout_s = timeout_s
        self._say = say
        self._server: ForkServer | None = None
        self._forks = True
        self._one_at_a_time = asyncio.Lock()

    async def open(self) -> None:
        """Imports the engine once. Raises UnavailableError with the log's path if the import fails."""
        async with self._one_at_a_time:
            # Workers that start at the same time share one server: an earlier holder of the lock may have started it.
            if not self._forks or (self._server is not None and not self._server.has_ended):
                return
            await self._close_server()
            self._say(f"importing {self._engine.title}")
            try:
                self._server = await ForkServer.start(
                    self._engine.preload, timeout_s=self._timeout_s, log=str(self._log_path)
                )
            except UnavailableError as error:
                if error.reason != THREADS:
                    line = failure_line(log_tail(self._log_path))
                    raise UnavailableError(
                        f"{self._engine.title} cannot be imported: {line or error.message}; log: {self._log_path}",
                        reason=error.reason,
                    ) from error
                self._forks = False
                self._say(f"{error.message}: workers start as programs of their own, which takes longer")

    async def start(self, spec: ChildSpec) -> Child:
        """Starts a worker. Raises the errors of `open`, and OSError if no process can be created."""
        await self.open()
        return await (start_child(spec) if self._server is None else fork_child(self._server, spec))

    async def aclose(self) -> None:
        """Ends the process that forks, and every worker that still runs."""
        await self._close_server()

    async def _close_server(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.aclose()
