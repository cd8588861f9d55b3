"""Blocking queries of one path of Consul's agent, again and again. The rules are those of `kvmesh/discovery/watching.py`."""

from collections.abc import AsyncGenerator
from random import Random

from kvmesh.clock import Clock
from kvmesh.discovery.connection import ConsulConnection
from kvmesh.discovery.retry import Backoff
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import MeshError


class BlockingQuery:
    """Answers of one path, the first at once, then one per change or per `watch_wait_s`."""

    def __init__(
        self,
        connection: ConsulConnection,
        path: str,
        *,
        settings: DiscoverySettings,
        clock: Clock,
        generator: Random,
    ) -> None:
        self._connection = connection
        self._path = path
        self._settings = settings
        self._clock = clock
        self._random = generator.random
        self._index = 0

    async def answers(self) -> AsyncGenerator[bytes | MeshError, None]:
        """Never ends. A failure is one item; the next answer comes after a pause that grows, and does not wait for a change."""
        settings = self._settings
        backoff = Backoff(first_s=settings.backoff_first_s, max_s=settings.backoff_max_s, random=self._random)
        while True:
            item: bytes | MeshError
            began_s = self._clock.now()
            try:
                item = await self.next()
                backoff.reset()
                pause_s = began_s + settings.watch_interval_min_s - self._clock.now()
            except MeshError as error:
                item, pause_s, self._index = error, backoff.next_s(), 0
            yield item
            if pause_s > 0:
                await self._clock.sleep(pause_s)

    async def next(self) -> bytes:
        """One answer: at once for the first, else after a change or the longest wait."""
        if self._index:
            response = await self._connection.wait(self._path, self._index, random=self._random)
        else:
            response = await self._connection.call("GET", self._path)
        self._index = 0 if response.index < self._index else max(1, response.index)
        return response.body
