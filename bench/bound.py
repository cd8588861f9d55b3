"""Runs a command that the kernel ends with SIGTERM when this process's parent dies: `python -m bench.bound PARENT_PID COMMAND...`.

Without it, a benchmark that is killed would leave its servers running. The setting survives `exec`.
"""

import os
import signal
import sys
from collections.abc import Sequence

from kvmesh.lifecycle import die_with_parent


def bound(command: Sequence[str]) -> Sequence[str]:
    """Returns the command line for a child of this process. Start the child from the main thread: the kernel watches the thread that forks."""
    return (sys.executable, "-m", "bench.bound", str(os.getpid()), *command)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal_number=signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
