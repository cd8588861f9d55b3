"""Starts services as forks of a process that has imported them, so that they share the memory of their imports.


Event loops and threads do not survive a fork, so services are forked before any of them exists. At that time the registry's
address is not known. So each fork waits for an order with the module and arguments to run.
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
"""Environment variables that libraries read when they are imported."""


@dataclass(slots=True, eq=False)
class Forked:
    """A forked process that waits for its order. Implements `kvmesh.cli.children.Process`."""

    pid: int
    link: socket.socket

    def start(self, spec: ChildSpec) -> Child:
        """Sends the order to run `spec`. Call this once, on the event loop."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        order = {"module": spec.module, "argv": list(spec.argv), "env": dict(spec.env), "log": str(spec.log_path)}
        # The process may have ended already; `wait` reports that.
        # Closing the link ends the order: `_read_order` reads up to its end.
        with self.link, suppress(OSError):
            self.link.sendall(json.dumps(order).encode())
        return Child(spec, self)

    async def wait(self) -> int:
        """Waits for the end. Returns the exit status; minus the signal's number if a signal ended it. For one caller."""
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
    """Imports the modules and forks one waiting process per name.

    Returns no processes if that is not safe: threads already run, or the kernel cannot wait for them (not Linux, or older
    than 5.3).
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
    """Imports modules with the garbage collector off, and freezes their objects.

    A collection in a child would write to the objects' headers and so copy the shared pages. A module that cannot be imported
    is skipped: the child that needs it fails with the error in its own log.
    """
    added = {name: value for name, value in IMPORT_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    gc.disable()
    try:
        # numpy's linear algebra would start threads; no service uses it.
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
    """Modules that services import at run time, except those that take seconds."""
    nixl = api_module()
    return ("uvloop",) if nixl == SELECTING_MODULE else ("uvloop", nixl)


def _fork(others: Sequence[Forked]) -> Forked:
    parent = os.getpid()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        # Otherwise the children would not see the end of file when the parent closes its ends.
        for link in (ours, *(other.link for other in others)):
            link.close()
        _wait_and_run(parent, theirs)
    theirs.close()
    return Forked(pid=pid, link=ours)


def _wait_and_run(parent: int, link: socket.socket) -> NoReturn:
    """Runs in the child. Never returns into the parent's stack."""
    status = 1
    try:
        os.setsid()  # A terminal's Ctrl-C is for the parent, which stops children in order.
        die_with(parent)
        order = _read_order(link)
        status = _run(order) if order else 0
    except BaseException:  # noqa: BLE001  # The process ends with this; the traceback goes to its log.
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _read_order(link: socket.socket) -> bytes:
    """Reads until the other end closes. Returns an empty order if the mesh ends before it has started this process."""
    with link, link.makefile("rb") as file:
        return file.read(ORDER_BYTES_MAX)


def _run(order: bytes) -> int:
    words = json.loads(order)
    redirect(words["log"])
    os.environ.update(words["env"])
    set_title_of(words["module"], words["argv"])
    reseed()
    # fork_all imported the module only for its imports. Running it as __main__ must not leave a second copy.
    sys.modules.pop(f"{words['module']}.__main__", None)
    return run_module(words["module"], words["argv"])
