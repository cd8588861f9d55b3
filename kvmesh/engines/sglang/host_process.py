"""Starts the engine process, talks to it over a Unix socket, and waits until its ranks are registered."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

import aiohttp

import kvmesh
from kvmesh.engines.sglang.messages import FromHost, ToHost, frame, from_host_decoder, take_frames
from kvmesh.errors import UnavailableError

HOST_MODULE = "kvmesh.engines.sglang.host"
VENV_SUFFIX = "-sglang"
ROUTE = {
    "prefill_dp_rank": "-1",
    "prefill_cp_rank": "-1",
    "target_tp_rank": "-1",
    "target_pp_rank": "-1",
}
"""Asks for the whole topology, which the server knows when all ranks are registered."""
TIMEOUT_S = 20.0
POLL_S = 0.1


class HostProcess(Protocol):
    """The engine process, however it was started."""

    def kill(self) -> None:
        """Ends it. Does nothing if it has ended."""
        ...

    async def wait(self) -> int:
        """Returns its exit status; negative for a signal."""
        ...


Launch = Callable[[Sequence[str]], Awaitable[HostProcess]]
"""Starts HOST_MODULE with these arguments."""


def find_python(setting: str) -> str:
    """Returns the Python that has SGLang."""
    if setting:
        return setting
    beside = Path(f"{sys.prefix}{VENV_SUFFIX}") / "bin" / "python"
    return str(beside) if beside.exists() else sys.executable


def launcher(python: str) -> Launch:
    """Starts the engine process as a program. It inherits this process's output and dies with it."""

    async def launch(arguments: Sequence[str]) -> HostProcess:
        try:
            process = await asyncio.create_subprocess_exec(
                python,
                *("-m", HOST_MODULE, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **_source_path()},
                # A terminal's Ctrl-C is for this process, which ends the engine in order.
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"cannot start {python}: {error.strerror}", reason="engine_missing") from error
        return _Program(process)

    return launch


class _Program:
    """A subprocess and the processes that it started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        return await self._process.wait()


def _source_path() -> dict[str, str]:
    """Makes the engine process import this kvmesh, unless kvmesh is installed among packages, which must not replace SGLang's."""
    root = Path(kvmesh.__path__[0]).parent
    if root.name in ("site-packages", "dist-packages"):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}


class HostLink(asyncio.Protocol):
    """The adapter's end of the socket. `on_message` gets each message, `on_end` is called once when the process is gone."""

    def __init__(self, on_message: Callable[[FromHost], None], on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._heard_at_s = 0.0
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses.
        self._transport = cast(asyncio.Transport, transport)
        if not self.connected.done():
            self.connected.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._heard_at_s = asyncio.get_running_loop().time()
        self._received += data
        for body in take_frames(self._received):
            self._on_message(from_host_decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def send(self, message: ToHost) -> None:
        """Does nothing when the process is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def pause(self) -> None:
        """Stops reading, which pauses the engine as soon as the socket's buffer is full."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._is_paused = True

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self._is_paused = False
            self._heard_at_s = asyncio.get_running_loop().time()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message; 0 while this side does not read."""
        return 0.0 if self._is_paused else asyncio.get_running_loop().time() - self._heard_at_s

    def close(self) -> None:
        """Ends the connection, and with it the engine process."""
        if self._transport is not None:
            self._transport.close()


@contextlib.asynccontextmanager
async def listening(link: HostLink):  # type: ignore[no-untyped-def]
    """Inside, one process may connect to the yielded path."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-sglang-") as folder:
        path = os.path.join(folder, "socket")
        server = await asyncio.get_running_loop().create_unix_server(lambda: link, path)
        try:
            yield path
        finally:
            server.close()


async def wait_registered(address: str) -> None:
    """Waits until the ranks of a prefill engine are registered with its bootstrap server. UnavailableError after TIMEOUT_S.

    SGLang tries to register for about 13 s and then reports ready, although it does not try again.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S), aiohttp.ClientSession() as session:
            while not await _is_registered(session, f"http://{address}/route"):  # noqa: ASYNC110 (a server to ask)
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise UnavailableError(
            f"the prefill engine did not register with its bootstrap server {address} within {TIMEOUT_S:g} s",
            reason="engine_start_failed",
        ) from error


async def _is_registered(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, params=ROUTE, timeout=aiohttp.ClientTimeout(total=2.0)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
