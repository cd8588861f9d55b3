"""Runs a program, and ends all that it started when it ends or when the process that asked for it dies.

`python -m kvmesh.cli.guard PARENT_PID PROGRAM ARGUMENT...`. A program that starts processes of its own may be killed, or its
parent may be: on Linux the guard adopts what is left behind, in whatever session, and kills it. SIGINT goes to the program;
SIGTERM, which is also what the kernel sends when the parent dies, kills everything. The exit status is the program's.
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
"""As a shell counts a program that a signal ended."""


def run(parent_pid: int, command: Sequence[str]) -> int:
    """Returns when the program and all its descendants have ended."""
    # A signal that comes early waits for sigwait.
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
    """Collects children that have ended. The program's exit status, or minus the signal that ended it; None while it runs."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


def kill_descendants() -> None:
    """Kills children until none is left: those of a killed one become children of this process."""
    while True:
        for pid in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> Sequence[int]:
    """Children of this process, which has one thread. Empty where the kernel does not list them."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return ()


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
