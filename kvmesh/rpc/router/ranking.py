"""Chooses the routers that a frontend keeps streams to, if there are more routers than streams. Pure.

Rendezvous hashing: each frontend ranks all routers by a hash of both ids and keeps to the highest. So every router gets its
share of the frontends, also one that joins, and when one joins or leaves only the streams move that must.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from kvmesh.discovery.base import Health, Instance


def rank(key: str, router_id: str) -> tuple[int, str]:
    """How much the key (a frontend, a session) prefers the router: larger is better."""
    # CRC-32 is linear: the order of two routers would be the same for all keys but for one bit of them.
    return int.from_bytes(blake2b(f"{key}\0{router_id}".encode(), digest_size=8).digest(), "big"), router_id


def usable(routers: Iterable[Instance]) -> Sequence[Instance]:
    """Those that take requests; when there is none, those that are not said to be ill."""
    routers = tuple(routers)
    return [each for each in routers if each.takes_requests] or [
        each for each in routers if each.health is not Health.CRITICAL
    ]


def best(frontend_id: str, routers: Iterable[Instance], count: int) -> Sequence[Instance]:
    """The `count` that the frontend prefers, best first."""
    return sorted(routers, key=lambda each: rank(frontend_id, each.instance_id), reverse=True)[:count]


def better(frontend_id: str, routers: Mapping[str, Instance], standing: Sequence[str]) -> Instance | None:
    """A router to which one of the streams that stand should move; None: all are where they belong."""
    preferred = best(frontend_id, (each for each in routers.values() if each.takes_requests), len(standing))
    if all(router_id in {each.instance_id for each in preferred} for router_id in standing):
        return None
    return next((each for each in preferred if each.instance_id not in standing), None)


def worst(frontend_id: str, routers: Mapping[str, Instance], standing: Iterable[str]) -> str:
    """The router to leave when there are more streams than needed: one that takes no requests, else the least preferred."""

    def order(router_id: str) -> tuple[bool, tuple[int, str]]:
        router = routers.get(router_id)
        return router is not None and router.takes_requests, rank(frontend_id, router_id)

    return min(standing, key=order)
