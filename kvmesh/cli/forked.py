"""Services as forks of the process that imported them: the memory of what they import is there once for all of them.

They are forked before there is an event loop or a thread, none of which would outlive a fork, and wait until they are told what
to run, since the registry's address is not known by then.
"""

import asyncio
import gc
import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from kvmesh.cli.children import Child, ChildSpec
from kvmesh.kv.nixl_api import SELECTING_MODULE, api_module
from kvmesh.lifecycle.import_threads import single_threaded_imports
from kvmesh.worker.fork_loop import die_with, redirect, reseed, run_module, set_title_of

ORDER_BYTES_MAX = 1 << 20
IMPORT_ENVIRONMENT = {"NIXL_LOG_LEVEL": "ERROR"}
"""Read by libraries when they are imported."""


@dataclass(slots=True, eq=False)
class Forked:
    """A process that waits for its order; a Process of kvmesh.cli.children."""

    pid: int
    link: socket.socket

    def start(self, spec: ChildSpec) -> Child:
        """Has it run `spec`. To be called once, in the event loop."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        order = {"module": spec.module, "argv": list(spec.argv), "env": dict(spec.env), "log": str(spec.log_path)}
        # The process may have ended already; `wait` reports that.
        with self.link, suppress(OSError):
            self.link.sendall(json.dumps(order).encode())
        return Child(spec, self)

    async def wait(self) -> int:
        """Its exit status, or minus the signal that ended it. For one caller."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        handle = os.pidfd_open(self.pid)
        try:
            loop.add_reader(handle, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])  # noqa: ASYNC222  # It has ended.


def fork_all(names: Sequence[str], modules: Sequence[str]) -> Mapping[str, Forked]:
    """Imports the modules and forks a process for each name; none of them runs anything yet.

    No processes where that would not be safe: they could not be told to die with this one or be waited for (not Linux, or one
    older than 5.3), or threads run already.
    """
    if not _can_wait():
        return {}
    import_all(modules)
    if len(os.listdir("/proc/self/task")) > 1:
        return {}
    sys.stdout.flush()
    sys.stderr.flush()
    forked: dict[str, Forked] = {}
    for name in names:
        forked[name] = _fork(list(forked.values()))
    return forked


def _can_wait() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def import_all(modules: Sequence[str]) -> None:
    """With the garbage collector off: nothing of it is garbage, and who never looks through it does not copy it either.

    What cannot be imported is left to the child that needs it, which tells of it in its own log.
    """
    added = {name: value for name, value in IMPORT_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    gc.disable()
    try:
        # numpy's linear algebra, which no service uses, would start threads.
        with single_threaded_imports():
            for name in (*modules, *_late_modules()):
                with suppress(ImportError):
                    importlib.import_module(name)
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
        for name in added:
            del os.environ[name]


def _late_modules() -> Sequence[str]:
    """What services import when they run, except what takes seconds."""
    nixl = api_module()
    return ("uvloop",) if nixl == SELECTING_MODULE else ("uvloop", nixl)


def _fork(others: Sequence[Forked]) -> Forked:
    parent = os.getpid()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        # An end of a socket that is open here as well would not be seen to close.
        for link in (ours, *(other.link for other in others)):
            link.close()
        _wait_and_run(parent, theirs)
    theirs.close()
    return Forked(pid=pid, link=ours)


def _wait_and_run(parent: int, link: socket.socket) -> NoReturn:
    """The child: never returns into the parent's stack."""
    status = 1
    try:
        os.setsid()  # A terminal's Ctrl-C is for the parent, which stops children in order.
        die_with(parent)
        order = _read_order(link)
        status = _run(order) if order else 0
    except BaseException:  # noqa: BLE001  # The end of the process: the trace goes to its log.
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _read_order(link: socket.socket) -> bytes:
    """All that comes until the other end closes; nothing, when the mesh ends before it has begun."""
    with link, link.makefile("rb") as file:
        return file.read(ORDER_BYTES_MAX)


def _run(order: bytes) -> int:
    words = json.loads(order)
    redirect(words["log"])
    os.environ.update(words["env"])
    set_title_of(words["module"], words["argv"])
    reseed()
    # It was imported for what it imports; now it is run, and there should not be two of it.
    sys.modules.pop(f"{words['module']}.__main__", None)
    return run_module(words["module"], words["argv"])
