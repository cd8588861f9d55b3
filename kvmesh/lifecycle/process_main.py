"""The top of every service process: one line in each `__main__.py`."""

import os
import sys
from collections.abc import Awaitable, Callable

from kvmesh.errors import MeshError
from kvmesh.lifecycle.garbage import collect_seldom
from kvmesh.lifecycle.parts import PartFailedError
from kvmesh.lifecycle.process import die_with_parent, run

PARENT_VARIABLE = "KVMESH_PARENT_PID"
EXIT_FAILED = 1


def run_process(make_main: Callable[[], Awaitable[None]]) -> int:
    """Runs a process's main coroutine and returns its exit status. Prints a failure in one line.

    A process that was started by `kvmesh up` dies with it.
    """
    if parent := os.environ.pop(PARENT_VARIABLE, ""):
        die_with_parent(int(parent))

    collect_seldom()

    async def main() -> None:
        await make_main()

    try:
        run(main())
    except KeyboardInterrupt:
        return 130
    except (PartFailedError, ExceptionGroup, MeshError) as error:
        words = f"{error}: {error.__cause__}" if error.__cause__ else f"{error}"
        print(words, file=sys.stderr)  # noqa: T201 (the last words of a process)
        return EXIT_FAILED
    return 0
