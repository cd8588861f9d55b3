"""The guard leaves no process behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.integration.mesh import is_running
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux hands orphans to a process")

GUARD = "import sys; from kvmesh.cli.guard import run; sys.exit(run(int(sys.argv[1]), sys.argv[2:]))"
PARENT = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], str(os.getpid()), *sys.argv[2:]])
"""
FAMILY = """
import os, signal, time
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(writer, str(os.getpid()).encode())
    time.sleep(600)
os.waitpid(child, 0)
print(os.getpid(), os.read(reader, 20).decode(), sep="\\n", flush=True)
{end}
"""
"""A program with a grandchild in a session of its own. Only SIGKILL ends the grandchild, and its parent has ended."""
WAIT = "while True: time.sleep(0.1)"
"""Sleeps in short steps, because a signal that arrives just before a sleep does not interrupt it."""


@contextmanager
def family(argv: Callable[[str], list[str]], end: str) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """Runs `FAMILY` under a guard. Yields the process and the ids of the family's two members."""
    with subprocess.Popen(argv(FAMILY.format(end=end)), stdout=subprocess.PIPE, text=True) as process:
        members: list[int] = []
        try:
            assert process.stdout is not None
            members += [int(process.stdout.readline()) for _ in range(2)]
            yield process, members
        finally:
            for pid in (process.pid, *members):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def below_guard(program: str) -> list[str]:
    return [sys.executable, "-c", GUARD, str(os.getpid()), sys.executable, "-c", program]


def below_parent(program: str) -> list[str]:
    return [sys.executable, "-c", PARENT, GUARD, sys.executable, "-c", program]


def wait_gone(pids: list[int]) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < ends_s, pids
        time.sleep(0.01)


@pytest.mark.parametrize(("end", "status"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_processes_that_a_program_leaves_behind_end_with_it(end: str, status: int) -> None:
    """When the program ends, the guard kills the processes that it leaves behind, and exits with the program's status."""
    with family(below_guard, end) as (guard, members):
        assert guard.wait(PATIENCE_S) == status
        assert not any(is_running(pid) for pid in members)


def test_a_killed_parent_leaves_nothing() -> None:
    """If the guard's parent is killed, the kernel signals the guard, which kills the family."""
    with family(below_parent, WAIT) as (parent, members):
        parent.kill()
        wait_gone(members)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_family(number: int, status: int) -> None:
    """The guard passes SIGINT on to the program, and kills the family on SIGTERM."""
    with family(below_guard, WAIT) as (guard, members):
        guard.send_signal(number)
        assert guard.wait(PATIENCE_S) == status
        assert not any(is_running(pid) for pid in members)
