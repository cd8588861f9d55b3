"""Runs several coroutines as tasks."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Returns the results in order. The first failure cancels the others and is raised itself, not in a group.

    A cancel of the caller cancels all of them and raises CancelledError, even if one of them fails at that moment. Before Python 3.13,
    `asyncio.TaskGroup` raises only the failure in that case, so a loop that catches failures continues although its task was cancelled.
    """
    if not works:
        return []
    tasks = [asyncio.create_task(work) for work in works]
    try:
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            # Reads them all, so that asyncio does not report those that are not raised.
            failures = [task.exception() for task in tasks if not task.cancelled()]
        for failure in failures:
            if failure is not None:
                raise failure
        return [task.result() for task in tasks]
    finally:
        # The traceback of a failure has this frame, which must not refer to the failure: only the garbage collector would free it.
        tasks, failures, failure, task = [], [], None, None  # type: ignore[assignment]
