"""A router that begins takes no requests before it knows what the others know: the workers' blocks, and what is in flight."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from kvmesh.clock import Clock
from kvmesh.discovery.base import Health, Registration
from services.router.core import RouterCore
from services.router.index.kv_feed import Trust
from services.router.settings import JoiningSettings

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.02
JOINING_CHECK_INTERVAL_S = 1.0
"""Of the registry's health check while joining; one with another interval begins at once when the router is ready."""


class Viewed(Protocol):
    """Somebody who follows the registry."""

    async def wait_viewed(self) -> None:
        """Until the registry has told of everybody."""
        ...


class Elders(Viewed, Protocol):
    """The routers that are there already; `peers.Peers`."""

    @property
    def has_elders(self) -> bool:
        """True when others take requests."""
        ...

    @property
    def awaited(self) -> tuple[str, ...]:
        """Those whose work is not known yet."""
        ...

    def count_strangers(self) -> None:
        """Counts what they told of workers that have become known since."""
        ...


class Entry(Protocol):
    """This router's entry in the registry; `kvmesh.discovery.presence.Presence`."""

    @property
    def registration(self) -> Registration:
        """What is to stand there."""
        ...

    async def start(self) -> None:
        """Stands there from now on."""
        ...

    async def set_health(self, health: Health, note: str = "") -> None:
        """Says how the router is."""
        ...

    async def update(self, registration: Registration) -> None:
        """Replaces what stands there."""
        ...


async def join(
    core: RouterCore,
    membership: Viewed,
    peers: Elders,
    entry: Entry,
    set_serving: Callable[[bool], Awaitable[None]],
    *,
    clock: Clock,
    settings: JoiningSettings,
) -> None:
    """Registers, as critical until everything is known or its time is over, then as passing."""
    await membership.wait_viewed()
    await peers.wait_viewed()
    registration = entry.registration
    if peers.has_elders:
        # Peers with smaller ids open the stream; they have to find this router first.
        await entry.update(replace(registration, check_interval_s=JOINING_CHECK_INTERVAL_S))
    began_s = clock.now()
    await asyncio.gather(
        _wait(lambda: not peers.awaited, settings.peers_wait_s, clock),
        _wait(lambda: not unknown_workers(core), settings.index_wait_s, clock),
    )
    peers.count_strangers()
    data = {"seconds": clock.now() - began_s, "routers": list(peers.awaited), "workers": unknown_workers(core)}
    if data["routers"] or data["workers"]:
        log.warning("router_joined_without", extra={"data": data})
    else:
        log.info("router_joined", extra={"data": data})
    await set_serving(True)
    await entry.set_health(Health.PASSING)
    await entry.update(registration)
    await entry.start()


def unknown_workers(core: RouterCore) -> list[str]:
    """Workers that the registry finds well and whose blocks are not known yet."""
    return [
        worker.worker_id
        for worker in core.fleet.workers.values()
        if not worker.is_critical and (worker.feed is None or worker.feed.trust is Trust.RECOVERING)
    ]


async def _wait(is_so: Callable[[], bool], timeout_s: float, clock: Clock) -> None:
    until_s = clock.now() + timeout_s
    while not is_so() and clock.now() < until_s:
        await clock.sleep(LOOK_INTERVAL_S)
