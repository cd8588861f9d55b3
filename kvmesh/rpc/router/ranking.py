"""Chooses the routers that a frontend keeps streams to, if there are more routers than streams. Pure.

Rendezvous hashing: each frontend ranks all routers by a hash of both ids and uses the highest. So every router, also a new one, gets
its share of the frontends, and when a router joins or leaves only the streams move that must.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from kvmesh.discovery.base import Health, Instance


def rank(key: str, router_id: str) -> tuple[int, str]:
    """Returns how much a frontend or session prefers a router: larger is better."""
    # Not CRC-32: it is linear, so two routers would have the same order for nearly all keys.
    return int.from_bytes(blake2b(f"{key}\0{router_id}".encode(), digest_size=8).digest(), "big"), router_id


def usable_routers(routers: Iterable[Instance]) -> Sequence[Instance]:
    """Returns the routers that take requests; if there are none, those that are not critical."""
    routers = tuple(routers)
    return [each for each in routers if each.takes_requests] or [
        each for each in routers if each.health is not Health.CRITICAL
    ]


def preferred_routers(frontend_id: str, routers: Iterable[Instance], count: int) -> Sequence[Instance]:
    """Returns the `count` routers that the frontend prefers, best first."""
    return sorted(routers, key=lambda each: rank(frontend_id, router_id=each.instance_id), reverse=True)[:count]


def find_better_router(frontend_id: str, routers: Mapping[str, Instance], used: Sequence[str]) -> Instance | None:
    """Returns a router that the frontend prefers to one that it uses. None: it uses the best ones."""
    takers = (each for each in routers.values() if each.takes_requests)
    preferred = preferred_routers(frontend_id, takers, len(used))
    if all(router_id in {each.instance_id for each in preferred} for router_id in used):
        return None
    return next((each for each in preferred if each.instance_id not in used), None)


def worst_router(frontend_id: str, routers: Mapping[str, Instance], used: Iterable[str]) -> str:
    """Returns the used router to leave first: one that takes no requests, else the least preferred."""

    def order(router_id: str) -> tuple[bool, tuple[int, str]]:
        router = routers.get(router_id)
        return router is not None and router.takes_requests, rank(frontend_id, router_id=router_id)

    return min(used, key=order)
