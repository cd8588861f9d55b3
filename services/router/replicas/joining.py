"""Starts serving: a new router takes requests once it knows the workers' blocks and the other routers' reservations."""

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

POLL_INTERVAL_S = 0.02
JOINING_CHECK_INTERVAL_S = 1.0
"""Interval of the registry's health check while joining. A check with another interval starts at once when the router is ready."""


class RegistryFollower(Protocol):
    """Somebody who follows the registry."""

    async def wait_viewed(self) -> None:
        """Waits until the registry has listed all instances."""
        ...


class Peers(RegistryFollower, Protocol):
    """The other routers; implemented by `PeerStreams`."""

    @property
    def has_older_peers(self) -> bool:
        """True when others take requests."""
        ...

    @property
    def awaited(self) -> tuple[str, ...]:
        """Routers whose reservations are not known yet."""
        ...

    def retry_pending(self) -> None:
        """Counts reservations whose workers have become known."""
        ...


class RegistryEntry(Protocol):
    """This router's entry in the registry; implemented by `kvmesh.discovery.presence.Presence`."""

    @property
    def registration(self) -> Registration:
        """What is registered."""
        ...

    async def start(self) -> None:
        """Registers."""
        ...

    async def set_health(self, health: Health, note: str = "") -> None:
        """Sets the health."""
        ...

    async def update(self, registration: Registration) -> None:
        """Replaces the registration."""
        ...


async def join(
    core: RouterCore,
    membership: RegistryFollower,
    peers: Peers,
    entry: RegistryEntry,
    *,
    set_serving: Callable[[bool], Awaitable[None]],
    clock: Clock,
    settings: JoiningSettings,
) -> None:
    """Registers as critical until everything is known or the time for it is over, then as passing."""
    await membership.wait_viewed()
    await peers.wait_viewed()
    registration = entry.registration
    if peers.has_older_peers:
        # Peers with smaller ids open the stream, and find this router in the registry.
        await entry.update(replace(registration, check_interval_s=JOINING_CHECK_INTERVAL_S))
    began_s = clock.now()
    await asyncio.gather(
        _wait(lambda: not peers.awaited, settings.peers_wait_s, clock),
        _wait(lambda: not recovering_workers(core), settings.index_wait_s, clock),
    )
    peers.retry_pending()
    data = {"seconds": clock.now() - began_s, "routers": list(peers.awaited), "workers": recovering_workers(core)}
    if data["routers"] or data["workers"]:
        log.warning("router_joined_without", extra={"data": data})
    else:
        log.info("router_joined", extra={"data": data})
    await set_serving(True)
    await entry.set_health(Health.PASSING)
    await entry.update(registration)
    await entry.start()


def recovering_workers(core: RouterCore) -> list[str]:
    """Workers that the registry lists as healthy and whose blocks are not known yet."""
    return [
        worker.worker_id
        for worker in core.fleet.workers.values()
        if not worker.is_critical and (worker.feed is None or worker.feed.trust is Trust.RECOVERING)
    ]


async def _wait(is_done: Callable[[], bool], timeout_s: float, clock: Clock) -> None:
    until_s = clock.now() + timeout_s
    while not is_done() and clock.now() < until_s:
        await clock.sleep(POLL_INTERVAL_S)
