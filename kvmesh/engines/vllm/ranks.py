"""Ends an engine's ranks with the engine. Ranks are processes, which vLLM lets outlive a killed parent.

vLLM starts ranks by `fork`, or by `spawn` (on a CPU, or if CUDA is in use already). The kernel kills them with the *thread* that started
them, so that must be the engine thread.
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
    """Inside, processes that the calling thread forks or spawns by multiprocessing die with it from their start on.

    A fork runs `_bind_fork`. A spawned process first imports the main module of its parent, which is SPAWNED_MAIN inside. Only one
    thread of a process at a time may be inside.
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
    """Binds this process to the engine. Ends it immediately if the engine has already died."""
    if engine_pid := os.environ.pop(ENGINE_VARIABLE, ""):
        die_with_parent(int(engine_pid))


def _bind_fork() -> None:
    engine_pid = getattr(_forking, "pid", None)
    if engine_pid is not None:
        # Processes that this rank forks have another parent, so `die_with_parent` would end them.
        del _forking.pid
        die_with_parent(engine_pid)


os.register_at_fork(after_in_child=_bind_fork)
