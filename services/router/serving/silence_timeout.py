"""A timeout for a silent worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class _SilenceTimer:
    """Objects and not closures: functions that refer to each other are a reference cycle, one for each load record."""

    __slots__ = ("_loop", "_reading_s", "_timeout", "_timer")

    def __init__(self, timeout: asyncio.Timeout, silence_s: float, reading_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._reading_s = reading_s
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(silence_s, self._read)

    def cancel(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _read(self) -> None:
        self._timer = self._loop.call_later(self._reading_s, self._end, self._loop.time() + self._reading_s)

    def _end(self, due_s: float) -> None:
        if self._loop.time() - due_s < self._reading_s:
            # Expires the timeout at once: `asyncio.timeout` then cancels the body and raises TimeoutError.
            self._timeout.reschedule(self._loop.time())
        else:
            self._read()


@asynccontextmanager
async def silence_timeout(silence_s: float, *, reading_s: float) -> AsyncIterator[None]:
    """Raises TimeoutError when the body has not ended after `silence_s`, nor in `reading_s` after that.

    In that second period this process reads messages that arrived while it was suspended. The period restarts if it ends late, because
    then the process was suspended again.
    """
    async with asyncio.timeout(None) as timeout:
        timer = _SilenceTimer(timeout=timeout, silence_s=silence_s, reading_s=reading_s)
        try:
            yield
        finally:
            timer.cancel()
