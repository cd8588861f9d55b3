"""Imports without starting threads, for processes that fork afterwards."""

import contextlib
import os
from collections.abc import Iterator, Mapping

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS")
"""Linear algebra libraries read these variables when they are loaded, and then start that many threads."""


@contextlib.contextmanager
def single_threaded_imports(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Inside, these libraries load with one thread. Afterwards the environment is restored, for processes that are started later.

    `more` are further variables to set inside.
    """
    inside = {**dict.fromkeys(THREAD_VARIABLES, "1"), **(more or {})}
    before = {name: os.environ.get(name) for name in inside}
    os.environ.update(inside)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
