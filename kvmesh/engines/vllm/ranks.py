"""Ties the life of an engine's ranks to the engine: a rank is a process of its own, and vLLM lets it outlive a killed parent.

vLLM starts ranks by `fork` (CUDA) or by `spawn` (CPU, WSL, or where CUDA is in use already). Either way the kernel watches the
thread that started them, which must be the engine's own: it ends with the engine.
"""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator

from kvmesh.lifecycle import die_with_parent

_engine = threading.local()


@contextlib.contextmanager
def forks_die_with_this_thread() -> Iterator[None]:
    """Processes that the calling thread forks inside die with it, from their first instruction on."""
    _engine.pid = os.getpid()
    try:
        yield
    finally:
        del _engine.pid


def bind_spawned_rank() -> None:
    """Called when a rank imports the worker extension. Ends the process at once if the engine died during the imports before.

    Does nothing in the engine's own process. A forked rank is bound already.
    """
    engine = multiprocessing.parent_process()
    if engine is not None and engine.pid is not None:
        die_with_parent(engine.pid)


def _bind_fork() -> None:
    engine_pid = getattr(_engine, "pid", None)
    if engine_pid is not None:
        del _engine.pid
        die_with_parent(engine_pid)


os.register_at_fork(after_in_child=_bind_fork)
