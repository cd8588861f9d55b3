"""Runs a program, and kills all its descendants when the program ends or the guard's parent dies.

`python -m kvmesh.cli.guard PARENT_PID PROGRAM ARGUMENT...`. On Linux the guard adopts orphaned descendants, whatever their session, and
kills them. It passes SIGINT to the program. SIGTERM, which the kernel also sends when the parent dies, kills everything. The exit
status is the program's.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvmesh.lifecycle.process import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)
EXIT_BY_SIGNAL = 128
"""A shell's exit status for a program that a signal ended, less the signal's number."""


def run(parent_pid: int, command: Sequence[str]) -> int:
    """Returns the exit status when the program and all its descendants have ended."""
    # Early signals stay pending until sigwait.
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die_with_parent(parent_pid, signal_number=signal.SIGTERM)
    program = os.posix_spawnp(command[0], list(command), os.environ, setsigmask=former_mask)
    status = EXIT_BY_SIGNAL + signal.SIGTERM
    while (number := signal.sigwait(SIGNALS)) != signal.SIGTERM:
        if number == signal.SIGINT:
            os.kill(program, signal.SIGINT)
        elif (ended := reap(program)) is not None:
            status = ended if ended >= 0 else EXIT_BY_SIGNAL - ended
            break
    else:
        os.kill(program, signal.SIGKILL)
    kill_descendants()
    return status


def reap(program: int) -> int | None:
    """Reaps ended children. Returns the program's exit status, or minus its signal; None while it runs."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def kill_descendants() -> None:
    """Kills children until none is left. The children of a killed process become children of this one."""
    while True:
        for pid in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> Sequence[int]:
    """Children of this single-threaded process. Empty if the kernel does not list them."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return ()


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
