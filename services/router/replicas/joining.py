"""Starts serving: a new router takes requests once it knows the workers' blocks and the other routers' reservations."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from kvmesh.clock import Clock
from kvmesh.core import Role
from kvmesh.discovery.base import Health
from kvmesh.discovery.presence import Presence
from kvmesh.event_log import event_logger
from services.router.core import RouterCore
from services.router.index.kv_feed import Trust
from services.router.replicas.peer_streams import PeerStreams
from services.router.serving.membership import FleetMembership
from services.router.settings import JoiningSettings

_log = event_logger(__name__)

POLL_INTERVAL_S = 0.02
JOINING_CHECK_INTERVAL_S = 1.0
"""Interval of the registry's health check while joining. A check with another interval starts immediately when the router is ready."""


async def join(
    core: RouterCore,
    membership: FleetMembership,
    peers: PeerStreams,
    *,
    presence: Presence,
    set_serving: Callable[[bool], Awaitable[None]],
    clock: Clock,
    settings: JoiningSettings,
) -> None:
    """Registers as critical until everything is known or the time for it is over, then as passing."""
    await membership.wait_viewed()
    await peers.wait_viewed()
    registration = presence.registration
    # Frontends that start now see that there is a router. Peers with smaller ids open the stream, and find this router in the registry.
    await presence.update(replace(registration, check_interval_s=JOINING_CHECK_INTERVAL_S))
    began_s = clock.now()
    await asyncio.gather(
        _wait(lambda: not peers.awaited, settings.peers_wait_s, clock),
        _wait_known(core, settings, clock),
    )
    peers.retry_pending()
    elapsed_s, routers, workers = round(clock.now() - began_s, 3), list(peers.awaited), recovering_workers(core)
    if routers or workers:
        _log.warning("router_joined_without", elapsed_s=elapsed_s, router_ids=routers, worker_ids=workers)
    else:
        _log.info("router_joined", elapsed_s=elapsed_s)
    await set_serving(True)
    await presence.set_health(Health.PASSING)
    await presence.update(registration)
    await presence.start()


def recovering_workers(core: RouterCore) -> list[str]:
    """Workers that the registry lists as healthy and whose blocks are not known yet."""
    return [
        worker.worker_id
        for worker in core.fleet.workers.values()
        if not worker.is_critical and (worker.feed is None or worker.feed.trust is Trust.RECOVERING)
    ]


async def _wait_known(core: RouterCore, settings: JoiningSettings, clock: Clock) -> None:
    """Without a decode worker the router would refuse every request, for example while services register again with an empty registry."""
    await _wait(lambda: has_decode_worker(core), settings.workers_wait_s, clock)
    await _wait(lambda: not recovering_workers(core), settings.index_wait_s, clock)


def has_decode_worker(core: RouterCore) -> bool:
    """Returns whether the registry lists one that is healthy and does not drain."""
    workers = core.fleet.workers.values()
    return any(each.role is Role.DECODE and not each.is_critical and not each.is_marked_draining for each in workers)


async def _wait(is_done: Callable[[], bool], timeout_s: float, clock: Clock) -> None:
    until_s = clock.now() + timeout_s
    while not is_done() and clock.now() < until_s:
        await clock.sleep(POLL_INTERVAL_S)
