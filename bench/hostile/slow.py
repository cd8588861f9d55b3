"""Reports where a slow request of the tenant spent its time, from the router's explanation."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from bench.mesh import Served
from kvmesh.core.inspection import Explanation
from kvmesh.discovery.base import ROUTER
from kvmesh.errors import MeshError
from kvmesh.rpc.router.client import GrpcRouterClient

CALL_TIMEOUT_S = 10.0
Explain = Callable[[str], Awaitable[str]]
"""Returns the router's explanation of the request with this id. Must be called soon, because the router keeps few requests."""


@asynccontextmanager
async def explaining(served: Served) -> AsyncIterator[Explain]:
    """Connects to the router. Yields the function that explains requests."""
    assert served.target is not None
    registry, channels = served.target.registry(), served.target.channels()

    async def explain(request_id: str) -> str:
        try:
            return _line(await client.explain(request_id, timeout_s=CALL_TIMEOUT_S))
        except MeshError as error:
            return error.reason

    try:
        (router,) = (await registry.instances(ROUTER)).instances
        client = GrpcRouterClient(channels, router.address)
        yield explain
    finally:
        await channels.aclose()
        await registry.aclose()


def _line(found: Explanation) -> str:
    queued_ms = 1000 * (found.queued_s or 0.0)
    reports = (f"{each.kind.value} {1000 * each.elapsed_s:.0f}" for each in found.reports)
    return f"attempt {found.attempt}, queued {queued_ms:.0f} ms; ms from the placement on: {', '.join(reports)}"
