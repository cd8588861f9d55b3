"""Ranks that vLLM forks die with the engine's process, however early it is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel call is Linux's")

ENGINE = """
import contextlib, os, sys, threading, time
from kvmesh.engines.vllm.ranks import forks_die_with_this_thread

def fork(bound):
    with forks_die_with_this_thread() if bound else contextlib.nullcontext():
        rank = os.fork()
    if rank == 0:
        time.sleep(600)
    print(rank, flush=True)

def engine():
    fork(True)
    other = threading.Thread(target=fork, args=(False,))
    other.start()
    other.join()
    fork(False)
    time.sleep(600)

threading.Thread(target=engine).start()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def running_engine() -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """The engine's process, and what it forked: a rank, a fork of another thread, one after the build."""
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True) as engine:
        forks: list[int] = []
        try:
            assert engine.stdout is not None
            forks += [int(engine.stdout.readline()) for _ in range(3)]
            yield engine, forks
        finally:
            for pid in (engine.pid, *forks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_forked_rank_dies_with_its_engine() -> None:
    """The kernel ends a rank even while it is stopped. What others fork is no rank: it is left alone."""
    with running_engine() as (engine, (rank, others, later)):
        os.kill(rank, signal.SIGSTOP)
        engine.kill()
        ends_s = time.monotonic() + PATIENCE_S
        while is_running(rank):
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        assert is_running(others) and is_running(later)
