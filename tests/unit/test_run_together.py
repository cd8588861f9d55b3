"""`run_together`: results, failures, and a cancel that comes together with a failure."""

import asyncio
import gc
from contextlib import suppress

import pytest

from kvmesh.errors import LostError
from kvmesh.lifecycle import run_together


async def returns(value: int, after: int = 0) -> int:
    """A value, some iterations of the loop later."""
    for _ in range(after):
        await asyncio.sleep(0)
    return value


async def waits(ended: list[str], name: str) -> int:
    """Until it is cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)
    return 0


async def fails(at: asyncio.Event) -> int:
    """When the event is set."""
    await at.wait()
    raise LostError("broken", reason="broken")


async def test_results_come_in_order() -> None:
    """Whatever ends first."""
    assert await run_together(returns(1, after=3), returns(2), returns(3, after=1)) == [1, 2, 3]


async def test_the_first_failure_ends_all() -> None:
    """It is raised alone, after the others have ended."""
    ended: list[str] = []
    failing = asyncio.Event()
    failing.set()
    with pytest.raises(LostError):
        await run_together(waits(ended, "a"), fails(failing), waits(ended, "b"))
    assert ended == ["a", "b"]


@pytest.mark.parametrize("order", ["failure first", "cancel first"])
async def test_a_cancel_together_with_a_failure_is_not_lost(order: str) -> None:
    """A loop around it ends, as it would not around a task group: the cancel of the loop's task comes only once."""
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
    await asyncio.wait([task], timeout=5.0)
    assert (task.cancelled(), rounds) == (True, 1)


async def test_every_moment_of_a_cancel() -> None:
    """A cancel in any iteration of the loop around a failure ends the caller."""
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
        await asyncio.wait([task], timeout=5.0)
        assert task.cancelled(), moment
    else:
        raise AssertionError("it never ended by itself")
    with pytest.raises(LostError):
        task.result()


async def test_a_failure_leaves_no_garbage() -> None:
    """Services collect garbage rarely, because requests and lost workers make none."""

    gc.collect()
    gc.disable()
    try:
        for _ in range(100):
            with suppress(LostError):
                failing = asyncio.Event()
                failing.set()
                await run_together(fails(failing), returns(1))
        assert gc.collect() < 100
    finally:
        gc.enable()
