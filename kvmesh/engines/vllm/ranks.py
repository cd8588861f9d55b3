"""Ties the life of an engine's ranks to the engine: a rank is a process of its own, and vLLM lets it outlive a killed parent.

vLLM starts ranks by `fork`, or by `spawn` (on a CPU, or where CUDA is in use already). The kernel kills them with the *thread* that
started them, which must be the engine's own: it ends with the engine.
"""

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator

from kvmesh.lifecycle import die_with_parent

ENGINE_VARIABLE = "KVMESH_ENGINE_PID"
SPAWNED_MAIN = "kvmesh.engines.vllm.spawned_rank"

_forking = threading.local()


@contextlib.contextmanager
def ranks_die_with_this_thread() -> Iterator[None]:
    """Processes that the calling thread forks or spawns inside, by multiprocessing, die with it from their first moment on.

    A fork runs `_bind_fork`. A spawned process first imports the main module of its parent; inside, that is SPAWNED_MAIN.
    One thread of a process at a time may be inside.
    """
    main = sys.modules["__main__"]
    spec = main.__spec__
    _forking.pid = os.getpid()
    os.environ[ENGINE_VARIABLE] = str(_forking.pid)
    main.__spec__ = importlib.util.find_spec(SPAWNED_MAIN)
    try:
        yield
    finally:
        main.__spec__ = spec
        del os.environ[ENGINE_VARIABLE]
        del _forking.pid


def bind_spawned_rank() -> None:
    """Ends this process at once if the engine has died already."""
    if engine_pid := os.environ.pop(ENGINE_VARIABLE, ""):
        die_with_parent(int(engine_pid))


def _bind_fork() -> None:
    engine_pid = getattr(_forking, "pid", None)
    if engine_pid is not None:
        del _forking.pid
        die_with_parent(engine_pid)


os.register_at_fork(after_in_child=_bind_fork)
