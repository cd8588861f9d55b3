"""`kvmesh explain` with several routers: finds the router that placed a request, and reports routers that did not answer."""

import pytest

from kvmesh.core import Report, ReportKind
from kvmesh.discovery.base import ROUTER
from kvmesh.errors import NotFoundError, UnavailableError
from kvmesh.rpc.router.explanations import find_explanation
from tests.integration.test_router_service import Mesh, eventually, running_mesh
from tests.patience import PATIENCE_S
from tests.unit.router_fleets import ask


async def explained(mesh: Mesh, request_id: str):
    routers = (await mesh.registry.instances(ROUTER)).instances
    return await find_explanation(routers, mesh.channels, request_id, timeout_s=PATIENCE_S)


async def test_the_router_that_placed_the_request_explains_it():
    """All routers are asked, and the newest decision is returned. An unreachable router is an error only if no other router knows the
    request."""
    async with running_mesh() as mesh:
        with pytest.raises(UnavailableError) as none:
            await explained(mesh, "r1")
        assert none.value.reason == "no_router"
        await mesh.worker("d1", "decode")
        routers = {name: await mesh.router(name) for name in ("router-1", "router-2")}
        await eventually(lambda: all(router.takes() == {"d1"} for router in routers.values()))
        link = await mesh.link()
        placed = await link.place(ask("r1", [1, 2]), timeout_s=PATIENCE_S)
        link.report_nowait(placed.ask_id, Report(kind=ReportKind.FIRST_TOKEN, elapsed_s=0.25))
        used = next(router for router in routers.values() if router.core.history.get("r1") is not None)
        await eventually(lambda: used.core.history.get("r1").observed_ttft_s is not None)
        explanation, router_id = await explained(mesh, "r1")
        assert (router_id, explanation.request_id, explanation.observed_ttft_s) == (used.name, "r1", 0.25)
        assert explanation.cost_unit == "s"
        assert explanation.placement.expected_ttft_s > 0
        with pytest.raises(NotFoundError) as unknown:
            await explained(mesh, "never")
        assert (unknown.value.reason, unknown.value.field) == ("placement_not_found", "request_id")

        other = next(router for router in routers.values() if router is not used)
        await other.server.aclose()
        assert (await explained(mesh, "r1"))[1] == used.name
        with pytest.raises(UnavailableError) as partly:
            await explained(mesh, "never")
        assert other.name in partly.value.message
