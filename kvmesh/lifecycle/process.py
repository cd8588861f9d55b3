"""The process around the event loop."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
# Loaded here: a child that was forked out of a process with threads must not load libraries, whose lock may be held.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop where it is installed: half the cost per gRPC message of the standard loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def die_with_parent(parent_pid: int, *, signal_number: signal.Signals = signal.SIGKILL) -> bool:
    """Has the kernel send this process `signal_number` when its parent dies; False where the kernel cannot (not Linux).

    `parent_pid` is the parent's own `os.getpid()`, handed down, so that a parent that died before this call is noticed:
    the signal is sent at once then. The kernel watches the parent's *thread* that forked; fork from one that lives on.
    """
    if _LIBC is None:
        return False
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)
    return True
