"""Ranks of an engine die with the engine's process, even if it is killed during the start."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.mesh import is_running
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel call is Linux's")

ENGINE = """
import contextlib, multiprocessing, os, subprocess, threading, time
from kvmesh.engines.vllm.ranks import ranks_die_with_this_thread

# The process itself prints that it has started: before that, a fork may not have been bound yet.
STARTED = "import os, time; print({name!r}, os.getpid(), flush=True); time.sleep(600)"

def start(name, method, bound):
    with ranks_die_with_this_thread() if bound else contextlib.nullcontext():
        multiprocessing.get_context(method).Process(target=exec, args=(STARTED.format(name=name),)).start()

def engine(method):
    start("rank", method, True)
    with ranks_die_with_this_thread():
        other = threading.Thread(target=start, args=("other_thread", "fork", False))
        other.start()
        other.join()
    start("later", method, False)
    time.sleep(600)

if __name__ == "__main__":
    import sys
    # Since Python 3.12 no thread can start after the main thread has ended.
    thread = threading.Thread(target=engine, args=sys.argv[1:])
    thread.start()
    thread.join()
"""


@contextmanager
def running_engine(method: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, int]]]:
    """Yields the engine's process, and the pids of its started processes: `rank`, `other_thread` and `later` (after the build)."""
    with subprocess.Popen([sys.executable, "-c", ENGINE, method], stdout=subprocess.PIPE, text=True) as engine:
        pids: dict[str, int] = {}
        try:
            assert engine.stdout is not None
            for _ in range(3):
                name, text = engine.stdout.readline().split()
                pids[name] = int(text)
            yield engine, pids
        finally:
            for pid in (engine.pid, *pids.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_rank_dies_with_its_engine(method: str) -> None:
    """The kernel kills a rank even if it is stopped. Forks by other threads, or after the build, are not affected."""
    with running_engine(method) as (engine, pids):
        if method == "fork":
            os.kill(pids["rank"], signal.SIGSTOP)
        engine.kill()
        ends_s = time.monotonic() + PATIENCE_S
        while is_running(pids["rank"]):
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        assert is_running(pids["other_thread"]) and is_running(pids["later"])
