"""When those who watch a worker's load look at it: where the worker is awake anyway, and seldom while nothing is to be done.

Waking a process that sleeps costs more than what it does then: a look by a timer some 0.3 ms, ten times a second.
"""

import asyncio


class LoadBell:
    """Any number of watchers, each in one wait at a time. Rung by whatever changes the load."""

    def __init__(self) -> None:
        self._waits: dict[asyncio.Future[None], float] = {}
        """And from when on each is to be ended."""
        self._first_s = float("inf")

    def ring(self) -> None:
        """Ends the waits whose time has come. Runs once per step and per request."""
        if self._waits and (now_s := asyncio.get_running_loop().time()) >= self._first_s:
            for wait, from_s in self._waits.items():
                if from_s <= now_s and not wait.done():
                    wait.set_result(None)

    def end(self) -> None:
        for wait in self._waits:
            if not wait.done():
                wait.set_result(None)

    async def wait(self, at_least_s: float, at_most_s: float) -> None:
        """Until it rings, not before `at_least_s` nor after `at_most_s` from now."""
        loop = asyncio.get_running_loop()
        wait: asyncio.Future[None] = loop.create_future()
        self._waits[wait] = loop.time() + at_least_s
        self._first_s = min(self._waits.values())
        timer = loop.call_later(at_most_s, _end, wait)
        try:
            await wait
        finally:
            timer.cancel()
            del self._waits[wait]
            self._first_s = min(self._waits.values(), default=float("inf"))


def _end(wait: "asyncio.Future[None]") -> None:
    if not wait.done():
        wait.set_result(None)
