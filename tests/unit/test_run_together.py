"""`run_together`: results, failures, and a cancellation at the same time as a failure."""

import asyncio
import gc
from contextlib import suppress

import pytest

from kvmesh.errors import LostError
from kvmesh.lifecycle import run_together
from tests.patience import PATIENCE_S


async def returns(value: int, after: int = 0) -> int:
    """Returns a value some iterations of the loop later."""
    for _ in range(after):
        await asyncio.sleep(0)
    return value


async def waits(ended: list[str], name: str) -> int:
    """Waits until it is cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)
    return 0


async def fails(at: asyncio.Event) -> int:
    """Fails when the event is set."""
    await at.wait()
    raise LostError("broken", reason="broken")


async def test_results_are_in_order() -> None:
    """The order of the results does not depend on which coroutine ends first."""
    assert await run_together(returns(1, after=3), returns(2), returns(3, after=1)) == [1, 2, 3]


async def test_the_first_failure_cancels_the_others() -> None:
    """The failure is raised alone, after the others have ended."""
    ended: list[str] = []
    failing = asyncio.Event()
    failing.set()
    with pytest.raises(LostError):
        await run_together(waits(ended, "a"), fails(failing), waits(ended, "b"))
    assert ended == ["a", "b"]


@pytest.mark.parametrize("order", ["failure first", "cancel first"])
async def test_a_cancellation_at_the_time_of_a_failure_is_not_lost(order: str) -> None:
    """A loop that retries after failures ends when its task is cancelled once. With a task group that cancellation can be lost."""
    failing, rounds = asyncio.Event(), 0

    async def loop() -> None:
        nonlocal rounds
        while rounds < 3:
            rounds += 1
            try:
                await run_together(fails(failing), waits([], "other"))
            except LostError:
                await asyncio.sleep(0)

    task = asyncio.create_task(loop())
    for _ in range(3):
        await asyncio.sleep(0)
    if order == "failure first":
        failing.set()
        await asyncio.sleep(0)  # The failing task runs in the next iteration, and its caller in the one after that.
        task.cancel()
    else:
        task.cancel()
        failing.set()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert (task.cancelled(), rounds) == (True, 1)


async def test_a_cancellation_in_any_iteration_ends_the_caller() -> None:
    """The caller ends as cancelled for a cancellation in any iteration of the loop before it has ended by itself."""
    for moment in range(8):
        failing = asyncio.Event()
        task = asyncio.create_task(run_together(fails(failing), waits([], "other")))
        await asyncio.sleep(0)
        failing.set()
        for _ in range(moment):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.cancelled(), moment
    else:
        raise AssertionError("run_together did not end by itself")
    with pytest.raises(LostError):
        task.result()


async def test_a_failure_leaves_no_garbage() -> None:
    """A failure leaves no reference cycles, because services run the garbage collector rarely."""

    gc.collect()
    gc.disable()
    try:
        # So many that other objects of the process, such as those of gRPC's threads, leave fewer cycles meanwhile.
        for _ in range(1000):
            with suppress(LostError):
                failing = asyncio.Event()
                failing.set()
                await run_together(fails(failing), returns(1))
        assert gc.collect() < 1000
    finally:
        gc.enable()
