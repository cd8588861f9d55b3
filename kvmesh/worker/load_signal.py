"""Wakes the watchers of a worker's load.

Watchers run when the worker's loop is awake anyway, after a step or a request, because waking an idle process by a timer costs 0.3 ms,
ten times a second for each watcher.
"""

import asyncio


class LoadSignal:
    """Tells any number of waiting watchers that the load has changed."""

    def __init__(self) -> None:
        self._waits: dict[asyncio.Future[None], float] = {}
        """Waiting watchers, and the loop time from which on each may be woken."""
        self._first_s = float("inf")

    def notify(self) -> None:
        """Wakes the watchers whose shortest wait is over. Runs once per step and per request."""
        if self._waits and (now_s := asyncio.get_running_loop().time()) >= self._first_s:
            for wait, from_s in self._waits.items():
                if from_s <= now_s:
                    _resolve(wait)

    def notify_all(self) -> None:
        """Wakes all watchers, however long they have waited."""
        for wait in self._waits:
            _resolve(wait)

    async def wait(self, at_least_s: float, at_most_s: float) -> None:
        """Waits for a notification, not less than `at_least_s` and not more than `at_most_s`."""
        loop = asyncio.get_running_loop()
        wait: asyncio.Future[None] = loop.create_future()
        self._waits[wait] = loop.time() + at_least_s
        self._first_s = min(self._waits.values())
        timer = loop.call_later(at_most_s, _resolve, wait)
        try:
            await wait
        finally:
            timer.cancel()
            del self._waits[wait]
            self._first_s = min(self._waits.values(), default=float("inf"))


def _resolve(wait: "asyncio.Future[None]") -> None:
    if not wait.done():
        wait.set_result(None)
