"""How many requests of batches may be in flight: few enough that those who wait for their answer are not in their way."""

import asyncio

from services.frontend.api.batches.settings import BatchSettings
from services.frontend.pipeline.pipeline import Pipeline

_POLL_S = 0.05


class Slots:
    """Shared by all batches of a frontend; whoever waited longest is next, so that batches take turns."""

    def __init__(self, pipeline: Pipeline, settings: BatchSettings) -> None:
        self._pipeline = pipeline
        self._room = asyncio.Semaphore(settings.lines_in_flight_max)
        self._in_flight_max = max(1, int(pipeline.settings.requests_max * settings.frontend_share_max))

    async def take(self) -> None:
        """Waits for a slot, and until the frontend is not busy with others."""
        await self._room.acquire()
        try:
            while self._pipeline.in_flight >= self._in_flight_max and not self._pipeline.is_draining:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)  # Requests end many times a second; nobody tells of each.
        except BaseException:
            self._room.release()
            raise

    def give(self) -> None:
        """Gives a slot back."""
        self._room.release()
