"""Starts processes whose slow imports are done: `python -m kvmesh.worker.fork_server`, and the client for it.

A vLLM worker takes 6 s from `python` to a ready engine, most of it imports; from a fork it takes about one.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.errors import InvalidRequestError, UnavailableError
from kvmesh.worker.fork_loop import THREADS_PREFIX, kill_group, main

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
THREADS = "preload_threads"
"""Reason of the UnavailableError when the imports started threads, so that forking would not be safe."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForkedChild:
    """A process of the fork server, leader of its own group. `exit` is its status, or minus the signal that ended it."""

    pid: int
    exit: "asyncio.Future[int]"

    def send_signal(self, number: int = signal.SIGTERM) -> None:
        """Sends a signal to the whole group, unless the child has ended."""
        if not self.exit.done():
            kill_group(self.pid, number=number)


@dataclass(slots=True, kw_only=True)
class ForkServer:
    """A running fork server that dies with this process, and takes its children with it."""

    _process: asyncio.subprocess.Process
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _folder: "tempfile.TemporaryDirectory[str]"
    _children: dict[int, ForkedChild] = field(default_factory=dict)
    _asked: "deque[asyncio.Future[ForkedChild]]" = field(default_factory=deque)
    _task: "asyncio.Task[None] | None" = None

    @classmethod
    async def start(
        cls,
        preload: str,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
        log: str = "",
        python: str = "",
    ) -> "ForkServer":
        """Starts one, its messages into the file `log`, and waits until its imports are done. `python`: another one than this process's.

        UnavailableError when that fails, with the reason THREADS when the imports started threads; cancelled, nothing is left.
        """
        folder = tempfile.TemporaryDirectory(prefix="kvmesh-fork-")
        path = os.path.join(folder.name, "socket")
        with contextlib.ExitStack() as files:
            process = await asyncio.create_subprocess_exec(
                *(python or sys.executable, "-m", "kvmesh.worker.fork_server", "--socket", path, "--preload", preload),
                env={**os.environ, **(env or {})},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=files.enter_context(open(log, "ab")) if log else None,  # noqa: ASYNC230 (a local file, once)
                start_new_session=True,  # A terminal's Ctrl-C is for the parent, which stops children in order.
            )
        try:
            async with asyncio.timeout(timeout_s):
                await _read_ready(process)
                reader, writer = await asyncio.open_unix_connection(path)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            folder.cleanup()
            # The transport of the process must not outlive this call: its event loop may be closed next.
            await asyncio.wait([asyncio.create_task(process.wait())], timeout=STOP_TIMEOUT_S)
            if isinstance(error, TimeoutError):
                raise UnavailableError(f"the fork server was not ready after {timeout_s:g} s") from error
            raise
        server = cls(_process=process, _reader=reader, _writer=writer, _folder=folder)
        server._task = asyncio.create_task(server._read())
        return server

    @property
    def has_ended(self) -> bool:
        """True if the server has ended. Its children have died with it."""
        return self._task is None or self._task.done()

    async def spawn(
        self, module: str, argv: Sequence[str] = (), *, env: Mapping[str, str | None] | None = None, log: str = ""
    ) -> ForkedChild:
        """Forks and runs `python -m module argv...` with its output in the file `log`. `env` sets variables; None removes one.

        Returns when the child exists. The caller finds out whether it is ready.
        """
        if self.has_ended:
            raise UnavailableError("the fork server has ended")
        asked: asyncio.Future[ForkedChild] = asyncio.get_running_loop().create_future()
        # The server replies in the order of the requests. No await between this line and the write keeps both in the same order.
        self._asked.append(asked)
        request = {"module": module, "argv": list(argv), "env": dict(env or {}), "log": log}
        self._writer.write(json.dumps(request).encode() + b"\n")
        return await asked

    async def wait(self, child: ForkedChild) -> int:
        """Waits for a child's end and returns its exit status. A cancelled wait does not stop the child."""
        # A cancel of this wait must not cancel the future, whose result `_take` sets.
        return await asyncio.shield(child.exit)

    async def aclose(self) -> None:
        """Kills the children that still run and ends the server. Idempotent."""
        for child in list(self._children.values()):
            child.send_signal(signal.SIGKILL)
        self._writer.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            # It may have ended at this moment.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
        self._folder.cleanup()

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                self._take(json.loads(line))
        except (OSError, ValueError):
            pass
        finally:
            # The server reports the ends of its children, which die with it.
            for child in list(self._children.values()):
                child.exit.set_result(-signal.SIGKILL)
            self._children.clear()
            while self._asked:
                _refuse(self._asked.popleft(), UnavailableError("the fork server has ended"))

    def _take(self, message: dict[str, Any]) -> None:
        if "exit" in message:
            child = self._children.pop(message["pid"], None)
            if child is not None:
                child.exit.set_result(message["exit"])
        elif "pid" in message:
            child = ForkedChild(pid=message["pid"], exit=asyncio.get_running_loop().create_future())
            self._children[child.pid] = child
            asked = self._asked.popleft()
            # The caller of `spawn` was cancelled, so no one else would end this child.
            if asked.done():
                child.send_signal(signal.SIGKILL)
            else:
                asked.set_result(child)
        else:
            _refuse(self._asked.popleft(), InvalidRequestError(str(message.get("error"))))


def _refuse(asked: "asyncio.Future[ForkedChild]", error: Exception) -> None:
    if not asked.done():
        asked.set_exception(error)


async def _read_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line.strip() == b"ready":
            return
        if line.startswith(THREADS_PREFIX.encode()):
            names = line.decode(errors="replace").removeprefix(THREADS_PREFIX).strip()
            raise UnavailableError(f"the imports started threads ({names})", reason=THREADS)
    raise UnavailableError(f"the fork server ended with status {await process.wait()} before it was ready")


if __name__ == "__main__":
    main()
