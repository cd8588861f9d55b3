"""The fork server's process: imports slow modules once, then forks a child per request. One thread, no event loop.

Protocol on a Unix stream socket, one JSON object per line. In: {"module", "argv", "env", "log"}. Out: {"pid"} for each in
turn, and {"pid", "exit"} when a child has ended (an exit status, or minus a signal). Children die with this process, which
dies with the one that started it. Closing a connection kills the children asked for on it.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kvmesh.lifecycle import end_process
from kvmesh.lifecycle.title import set_title

PR_SET_PDEATHSIG = 1
REQUEST_BYTES_MAX = 1 << 20
CHILDREN_MAX = 256
THREADS_PREFIX = "threads: "


def die_with(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call above; then no signal comes.
    if os.getppid() != parent_pid:
        os._exit(1)


def kill_group(pid: int, number: int) -> None:
    """Signals a child and the processes that it started. A child that has just been forked leads no group yet."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass(slots=True, eq=False)
class ForkClient:
    """One client."""

    link: socket.socket
    received: bytearray = field(default_factory=bytearray)
    children: set[int] = field(default_factory=set)

    def send(self, message: dict[str, Any]) -> None:
        """Blocks while the client's buffer is full. A client that has ended is noticed by its end of file."""
        with contextlib.suppress(OSError):
            self.link.sendall(json.dumps(message).encode() + b"\n")


class ForkLoop:
    """Listens, forks, reports."""

    def __init__(self, path: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(8)
        self._wakeup, self._signal = socket.socketpair()
        self._connections: set[ForkClient] = set()
        for link in (self._listener, self._wakeup, self._signal):
            link.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._reap)
        # A signal writes a byte to this socket, which ends `select`. Python does that only for signals with a handler of its own.
        signal.set_wakeup_fd(self._signal.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        link.setblocking(True)
        connection = ForkClient(link)
        self._connections.add(connection)
        self._selector.register(link, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: ForkClient) -> None:
        try:
            data = connection.link.recv(65536)
        except OSError:
            data = b""
        connection.received += data
        if not data or len(connection.received) > REQUEST_BYTES_MAX:
            self._drop(connection)
            return
        *lines, rest = bytes(connection.received).split(b"\n")
        connection.received = bytearray(rest)
        for line in lines:
            self._serve(connection, line)

    def _serve(self, connection: ForkClient, line: bytes) -> None:
        try:
            request = json.loads(line)
            module, argv = str(request["module"]), [str(item) for item in request["argv"]]
            env, log = dict(request["env"]), str(request["log"])
        except (ValueError, KeyError, TypeError) as error:
            connection.send({"error": f"not a request: {error}"})
            return
        if sum(len(each.children) for each in self._connections) >= CHILDREN_MAX:
            connection.send({"error": f"{CHILDREN_MAX} children run already"})
            return
        parent = os.getpid()
        # The child would write buffered text a second time.
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become(parent=parent, module=module, argv=argv, env=env, log=log)
        connection.children.add(pid)
        connection.send({"pid": pid})

    def _drop(self, connection: ForkClient) -> None:
        self._selector.unregister(connection.link)
        connection.link.close()
        self._connections.discard(connection)
        for pid in connection.children:
            # Children leave this set when they are reaped, so no other process has this id.
            kill_group(pid, number=signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        while True:
            try:
                # Several children may end before one SIGCHLD is handled.
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for connection in self._connections:
                if pid in connection.children:
                    connection.children.discard(pid)
                    connection.send({"pid": pid, "exit": os.waitstatus_to_exitcode(status)})

    def _become(self, *, parent: int, module: str, argv: list[str], env: dict[str, str | None], log: str) -> NoReturn:
        """Runs the child, which never returns into the server's stack."""
        status = 1
        try:
            os.setsid()
            die_with(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # An inherited end would keep a connection open after the server has closed it.
            for link in (self._listener, self._wakeup, self._signal, *(each.link for each in self._connections)):
                link.close()
            self._selector.close()
            redirect(log)
            set_environment(env)
            set_title_of(module, argv)
            reseed()
            gc.enable()
            status = run_module(module, argv)
        except BaseException:  # noqa: BLE001  # The end of the process: the trace goes to its log.
            traceback.print_exc()
        finally:
            end_process(status)


def redirect(log: str) -> None:
    """Sends standard output and error to a file, and connects standard input to /dev/null."""
    for target, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        opened = os.open(path or os.devnull, flags, 0o644)
        os.dup2(opened, target)
        os.close(opened)
    os.dup2(1, 2)


def set_title_of(module: str, argv: Sequence[str]) -> None:
    """Sets the command line that `ps` shows for a fork, as far as it fits."""
    if not set_title((sys.executable, "-m", module, *argv), needed=3):
        set_title((module,))


def set_environment(env: dict[str, str | None]) -> None:
    """Sets environment variables; None removes one."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


def reseed() -> None:
    """Children of one server must not share random numbers. `uuid4` reads the kernel's and needs no seed."""
    random.seed()  # noqa: TID251  # The global generator is what was inherited.
    # Where nothing has asked for numpy's generators yet they are not imported, and will draw their own seed.
    if (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int.from_bytes(os.urandom(7), "little"))


def run_module(module: str, argv: list[str]) -> int:
    """Runs `python -m module argv...` in this process. Returns its exit status."""
    sys.argv = [module, *argv]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # noqa: T201  # What the interpreter does with a text in sys.exit.
        return 1
    return 0


def preload(name: str) -> None:
    """Calls the preload function `module:function`; an empty name calls nothing."""
    module, _, function = name.partition(":")
    if module:
        getattr(importlib.import_module(module), function)()


def other_threads() -> list[str]:
    """Returns the names of all threads of this process except the main one, including native threads."""
    names = []
    for task in os.listdir("/proc/self/task"):
        # A thread may end meanwhile, also between opening and reading the file.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(task) != os.getpid():
                names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return sorted(names)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Prints "ready" on standard output when it listens, or the names of threads that the preload started."""
    parser = argparse.ArgumentParser(
        prog="kvmesh.worker.fork_server", description="Forks processes with slow imports done."
    )
    parser.add_argument("--socket", required=True, help="path of the Unix socket to listen on")
    parser.add_argument("--preload", default="", help="module:function to call before the first fork; empty: none")
    parser.add_argument(
        "--outlive-parent", action="store_true", help="do not die with the process that started this one"
    )
    options = parser.parse_args(arguments)
    if not options.outlive_parent:
        die_with(os.getppid())
    preload(options.preload)
    if names := other_threads():
        print(f"{THREADS_PREFIX}{', '.join(names)}", flush=True)  # noqa: T201  # The client reads this line.
        raise SystemExit(
            f"the preload started {len(names)} threads ({', '.join(names)}): forking now would not be safe"
        )
    loop = ForkLoop(options.socket)
    print("ready", flush=True)  # noqa: T201  # The client waits for this line.
    loop.run()
