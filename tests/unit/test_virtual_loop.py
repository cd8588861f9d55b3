"""The event loop with virtual time, which simulations use."""

import asyncio

import pytest

from tests.virtual_loop import DeadlockError, run_virtual


def test_timers_fire_in_order_without_real_waits() -> None:
    """Timers fire in the order of their times, and the loop's clock shows these times."""
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(sleeper("c", 7200.0), sleeper("a", 0.001), sleeper("b", 60.0))

    run_virtual(main())  # In real time pytest's timeout would end the test.
    assert [name for name, _ in seen] == ["a", "b", "c"]
    assert [at_s for _, at_s in seen] == pytest.approx([0.001, 60.0, 7200.0])


def test_timeouts_are_virtual() -> None:
    """`asyncio.timeout` ends a wait in virtual time."""

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(3600)


def test_a_deadlock_is_an_error() -> None:
    """A wait that nothing can end raises DeadlockError instead of hanging the test."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run_virtual(main())
