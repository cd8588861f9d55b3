"""When the watchers of a worker's load wake up."""

import asyncio

from kvmesh.worker.load_signal import LoadSignal
from tests.virtual_loop import run_virtual


def test_a_wait_ends_with_the_first_notification_after_its_minimum() -> None:
    """A wait ends with the first notification after its minimum, or else after its maximum. Earlier notifications are ignored."""

    async def main() -> None:
        loop, signal = asyncio.get_running_loop(), LoadSignal()
        signal.notify()

        async def wait_duration(at_least_s: float, at_most_s: float) -> float:
            began_s = loop.time()
            await signal.wait(at_least_s, at_most_s)
            return round(loop.time() - began_s, 6)

        async def steps() -> None:
            while True:
                await asyncio.sleep(0.006)
                signal.notify()

        assert await wait_duration(0.1, 0.125) == 0.125
        stepping = asyncio.create_task(steps())
        assert await wait_duration(0.1, 0.125) == 0.102
        together = await asyncio.gather(wait_duration(0.01, 1), wait_duration(0.05, 1), wait_duration(0, 1))
        assert list(together) == [0.012, 0.054, 0.006]
        stepping.cancel()
        waiting = asyncio.create_task(wait_duration(5, 10))
        await asyncio.sleep(1)
        signal.notify_all()
        assert await waiting == 1

    run_virtual(main())


def test_a_cancelled_wait_is_removed() -> None:
    """A cancelled wait leaves no entry, and later notifications do not fail."""

    async def main() -> None:
        signal = LoadSignal()
        waiting = asyncio.create_task(signal.wait(0, 10))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])
        signal.notify()
        signal.notify_all()
        assert not signal._waits

    run_virtual(main())
