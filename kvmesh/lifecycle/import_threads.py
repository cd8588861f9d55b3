"""Imports that start no thread, for processes that fork afterwards."""

import contextlib
import os
from collections.abc import Iterator, Mapping

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS")
"""Libraries of linear algebra read these when they are loaded, and start so many threads at once."""


@contextlib.contextmanager
def one_thread_each(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Inside, these libraries load with one thread, whatever the user's environment says; afterwards it is as it was.

    A user's values hold for the processes that are forked or started later. `more` are variables to set in the same way.
    """
    during = {**dict.fromkeys(THREAD_VARIABLES, "1"), **(more or {})}
    before = {name: os.environ.get(name) for name in during}
    os.environ.update(during)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
