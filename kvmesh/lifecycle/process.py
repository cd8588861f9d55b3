"""The top of every process: event loop, garbage collection, exit status, death with the parent."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from itertools import count
from typing import Any, NoReturn, TypeVar

from kvmesh.errors import MeshError
from kvmesh.lifecycle.parts import PartFailedError

T = TypeVar("T")
PARENT_VARIABLE = "KVMESH_PARENT_PID"
EXIT_FAILED = 1
YOUNG_OBJECTS = 5_000
"""A collection of so many takes about 8 ms if all of them are cycles, as those of refused requests are: of 50 000 it took 85 ms."""
SURVIVOR_ROUNDS = 200
OLDER_ROUNDS = 20
COLLECT_S = 60.0
_PR_SET_PDEATHSIG = 1
# Loaded here, since a child that a process with threads forked must not load libraries: their lock may be held.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop if it is installed, which halves the cost of a gRPC message."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def end_process(status: int) -> NoReturn:
    """Ends the process without running destructors of native libraries; for processes that load UCX.

    On machines with libibverbs, two copies of libnl are loaded, and the destructor of UCX's copy crashes: a normal end would look like a
    SIGSEGV.
    """
    with contextlib.suppress(OSError, ValueError):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def die_with_parent(parent_pid: int, *, signal_number: signal.Signals = signal.SIGKILL) -> bool:
    """Makes the kernel send this process `signal_number` when its parent dies. Returns False if it cannot (not Linux).

    The parent passes its `os.getpid()` as `parent_pid`. If the parent has already died, the signal is sent immediately. The kernel
    watches the parent's *thread* that forked this process, so fork from a thread that lives as long as the parent.
    """
    if _LIBC is None:
        return False
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)
    return True


def collect_rarely() -> None:
    """Makes collections of older objects rare. Call it once, after the imports, whose objects are then never scanned again.

    Requests and decisions make no reference cycles (`tests/unit/test_reference_cycles.py`). Scanning live objects (requests in flight, the
    router's history) took a tenth of the time of decisions.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, SURVIVOR_ROUNDS, OLDER_ROUNDS)


async def collect_young_objects(interval_s: float = COLLECT_S) -> None:
    """Collects objects that are younger than `interval_s`, and at times those of OLDER_ROUNDS intervals, until it is cancelled.

    Libraries and failures create reference cycles: a gRPC server one of 4 kB for each call. Before YOUNG_OBJECTS trigger a collection,
    these would take 4 MiB. One collection takes some milliseconds at most, as long as one of YOUNG_OBJECTS.
    """
    for number in count(1):
        await asyncio.sleep(interval_s)
        gc.collect(1 if number % OLDER_ROUNDS == 0 else 0)


def raise_descriptor_limit() -> None:
    """Raises the soft limit of open descriptors to the hard one.

    In a login shell the soft limit is 1 024, far below the frontend's connection limits: a thousand idle connections of one client would
    lock out all others.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # Systems without a hard limit have one of their own.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_process(make_main: Callable[[], Awaitable[None]]) -> int:
    """Runs a process's main coroutine and returns its exit status. Prints a failure in one line.

    A process that `kvmesh up` has started dies with it.
    """
    if parent := os.environ.pop(PARENT_VARIABLE, ""):
        die_with_parent(int(parent))

    raise_descriptor_limit()
    collect_rarely()

    async def main() -> None:
        collecting = asyncio.create_task(collect_young_objects(), name="collect-young-objects")
        try:
            await make_main()
        finally:
            collecting.cancel()

    try:
        run(main())
    except KeyboardInterrupt:
        return 130
    except (PartFailedError, ExceptionGroup, MeshError) as error:
        message = f"{error}: {error.__cause__}" if error.__cause__ else f"{error}"
        print(message, file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    return 0
