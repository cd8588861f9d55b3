"""A vLLM engine in its own process, behind the engine protocol, because vLLM's globals allow only one engine per process.

As a module (`python -m tests.integration.vllm_process SOCKET`) it is the child, which serves one engine over a Unix socket. `RemoteEngine` is
the client. Messages are length-prefixed pickles between processes of one test.
"""

import asyncio
import contextlib
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kvmesh.core import KvEvent, LoadRecord, Role
from kvmesh.engines.base import EngineDescription, EngineRequest, StepOutput
from kvmesh.engines.vllm.engine import VllmEngine
from kvmesh.engines.vllm.settings import VllmSettings
from kvmesh.errors import UnavailableError
from kvmesh.worker.fork_server import ForkedChild, ForkServer
from tests.patience import PATIENCE_S

HEAD = struct.Struct("<I")
MODULE = "tests.integration.vllm_process"
CALL_TIMEOUT_S = 60.0
END = "end"


def send(link: socket.socket, lock: threading.Lock, message: object) -> None:
    data = pickle.dumps(message)
    with lock:
        link.sendall(HEAD.pack(len(data)) + data)


def receive(link: socket.socket) -> Any:
    return pickle.loads(read(link, HEAD.unpack(read(link, HEAD.size))[0]))


def read(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


class RemoteEngine:
    """Implements `kvmesh.engines.base.Engine`. Its synchronous calls block for a round trip."""

    def __init__(
        self,
        server: ForkServer | None,
        settings: VllmSettings,
        folder: Path,
        *,
        start_now: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._environ = {"PYTHONPATH": None, **(environ or {})}
        self._server, self._settings, self._folder, self._start_now = server, settings, folder, start_now
        self._lock, self._number = threading.Lock(), 0
        self._answers: dict[int, Future[Any]] = {}
        self._steps: asyncio.Queue[Any] = asyncio.Queue()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._link: socket.socket | None = None
        self.child: ForkedChild | None = None
        self.log = folder / f"{settings.role}-{id(self):x}.txt"

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    async def start(self) -> None:
        assert self._server is not None
        self._loop = asyncio.get_running_loop()
        path = str(self._folder / f"{id(self):x}")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(CALL_TIMEOUT_S)
            self.child = await self._server.spawn(MODULE, [path], env=self._environ, log=str(self.log))
            self._link, _ = await asyncio.to_thread(listener.accept)
        self._link.settimeout(None)
        threading.Thread(target=self._read, daemon=True).start()
        await self._ask("build", self._settings)
        if self._start_now:
            await self._ask("start")

    def describe(self) -> EngineDescription:
        return self._ask_now("describe")

    def submit_nowait(self, request: EngineRequest) -> None:
        self._ask_now("submit_nowait", request)

    def cancel_nowait(self, key: int) -> None:
        self._ask_now("cancel_nowait", key)

    def leased_handles(self) -> int:
        return self._ask_now("leased_handles")

    def release_nowait(self, handle_id: str) -> bool:
        return self._ask_now("release_nowait", handle_id)

    def rank_loads(self) -> Sequence[LoadRecord]:
        return (self.load(),)

    @property
    def is_responsive(self) -> bool:
        return True

    def load(self) -> LoadRecord:
        return self._ask_now("load")

    async def steps(self) -> AsyncIterator[StepOutput]:
        async for output in drain(self._steps):
            yield output

    async def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        async for events in drain(self._events):
            yield events

    async def load_adapter(self, name: str, source: str) -> None:
        await self._ask("load_adapter", name, source)

    async def unload_adapter(self, name: str) -> None:
        await self._ask("unload_adapter", name)

    async def reset_cache(self) -> bool:
        return await self._ask("reset_cache")

    async def sleep(self, level: int) -> None:
        await self._ask("sleep", level)

    async def wake(self) -> None:
        await self._ask("wake")

    async def set_role(self, role: Role) -> None:
        await self._ask("set_role", role)

    async def break_engine(self) -> None:
        """Makes the next step raise."""
        await self._ask("break_engine")

    async def kill(self) -> None:
        """Kills the process. Returns when its memory is free, because a peer may read that without the process's help."""
        assert self.child is not None and self._server is not None
        self.child.send_signal(signal.SIGKILL)
        await self._server.wait(self.child)

    async def aclose(self) -> None:
        if self.child is None or self._server is None:
            return
        if not self.child.exit.done() and self._link is not None:
            self.child.send_signal(signal.SIGCONT)
            with contextlib.suppress(ConnectionError, UnavailableError):
                await self._ask("aclose")
                await self._ask("exit")
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._server.wait(self.child)
        except TimeoutError:
            self.child.send_signal(signal.SIGKILL)
            await self._server.wait(self.child)
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _ask(self, name: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._post(name, *arguments))

    def _ask_now(self, name: str, *arguments: Any) -> Any:
        return self._post(name, *arguments).result(CALL_TIMEOUT_S)

    def _post(self, name: str, *arguments: Any) -> "Future[Any]":
        answer: Future[Any] = Future()
        if self._link is None or (self.child is not None and self.child.exit.done()):
            answer.set_exception(UnavailableError("the process is gone"))
            return answer
        self._number += 1
        self._answers[self._number] = answer
        send(self._link, self._lock, (self._number, name, arguments))
        return answer

    def _read(self) -> None:
        assert self._link is not None
        link = self._link
        try:
            while True:
                kind, number, value = receive(link)
                if kind == "step":
                    self._loop.call_soon_threadsafe(self._steps.put_nowait, value)
                elif kind == "events":
                    self._loop.call_soon_threadsafe(self._events.put_nowait, value)
                elif kind == "ok":
                    self._answers.pop(number).set_result(value)
                else:
                    self._answers.pop(number).set_exception(value)
        except (EOFError, OSError):
            for answer in list(self._answers.values()):
                if not answer.done():
                    answer.set_exception(ConnectionError("the process is gone"))


async def drain(queue: "asyncio.Queue[Any]") -> AsyncIterator[Any]:
    while True:
        value = await queue.get()
        if isinstance(value, BaseException):
            raise value
        if value == END:
            return
        yield value


async def serve(path: str) -> None:
    """Runs in the child: serves one engine, and executes calls in the order in which they arrive."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    lock = threading.Lock()
    engine: VllmEngine | None = None
    tasks: list[asyncio.Task[None]] = []

    async def forward(kind: str, values: AsyncIterator[Any]) -> None:
        try:
            async for value in values:
                send(link, lock, (kind, 0, value))
            send(link, lock, (kind, 0, END))
        except Exception as error:
            send(link, lock, (kind, 0, error))

    async def call(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal engine
        try:
            if name == "build":
                engine, value = VllmEngine(*arguments), None
                tasks.append(asyncio.create_task(forward("step", engine.steps())))
                tasks.append(asyncio.create_task(forward("events", engine.kv_events())))
            elif name == "break_engine":
                value = engine._core._scheduler.schedule = None
            else:
                value = getattr(engine, name)(*arguments)
                value = await value if asyncio.iscoroutine(value) else value
            send(link, lock, ("ok", number, value))
        except Exception as error:
            send(link, lock, ("error", number, error))

    while True:
        number, name, arguments = await asyncio.to_thread(receive, link)
        if name == "exit":
            await asyncio.gather(*tasks)
            send(link, lock, ("ok", number, None))
            return
        if name.endswith("_nowait") or name in ("describe", "load", "build"):
            await call(number, name, arguments)
        else:
            tasks.append(asyncio.create_task(call(number, name, arguments)))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
