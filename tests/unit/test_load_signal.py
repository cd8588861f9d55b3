"""When who watches a worker's load is woken."""

import asyncio

from kvmesh.worker.load_signal import LoadBell
from tests.virtual_loop import run_virtual


def test_a_wait_ends_with_the_first_ring_whose_time_has_come() -> None:
    """Rings before count for nothing; without any it ends by itself."""

    async def main() -> None:
        loop, bell = asyncio.get_running_loop(), LoadBell()
        bell.ring()

        async def took(at_least_s: float, at_most_s: float) -> float:
            began_s = loop.time()
            await bell.wait(at_least_s, at_most_s)
            return round(loop.time() - began_s, 6)

        async def steps() -> None:
            while True:
                await asyncio.sleep(0.006)
                bell.ring()

        assert await took(0.1, 0.125) == 0.125
        stepping = asyncio.create_task(steps())
        assert await took(0.1, 0.125) == 0.102
        together = await asyncio.gather(took(0.01, 1), took(0.05, 1), took(0, 1))
        assert list(together) == [0.012, 0.054, 0.006]
        stepping.cancel()
        waiting = asyncio.create_task(took(5, 10))
        await asyncio.sleep(1)
        bell.end()
        assert await waiting == 1

    run_virtual(main())


def test_a_wait_that_is_cancelled_is_forgotten() -> None:
    """And holds nobody up."""

    async def main() -> None:
        bell = LoadBell()
        waiting = asyncio.create_task(bell.wait(0, 10))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])
        bell.ring()
        bell.end()
        assert not bell._waits

    run_virtual(main())
