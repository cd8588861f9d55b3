"""A clock that moves only when a test advances it."""

import asyncio


class ManualClock:
    """Sleepers wake in the order of their times when `advance` passes them."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    async def sleep(self, delay_s: float) -> None:
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        sleeper = (self._now + delay_s, asyncio.get_running_loop().create_future())
        self._sleepers.append(sleeper)
        try:
            await sleeper[1]
        finally:
            self._sleepers.remove(sleeper)

    async def advance(self, delay_s: float) -> None:
        """Moves the time forward and runs the tasks that wake. First runs ready tasks, so that those about to sleep measure from the old
        time."""
        await settle()
        end = self._now + delay_s
        while due := sorted(time for time, future in self._sleepers if time <= end and not future.done()):
            self._now = due[0]
            for time, future in list(self._sleepers):
                if time <= self._now and not future.done():
                    future.set_result(None)
            await settle()
        self._now = end
        await settle()


async def settle() -> None:
    """Lets ready tasks run. Does not wait for time to pass."""
    for _ in range(20):
        await asyncio.sleep(0)
