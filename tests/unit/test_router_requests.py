"""ListRequests: each request has its state, and is in flight only while the router has a reservation for it."""

from contextlib import suppress

import pytest

from kvmesh.core import Report, ReportKind, RequestList, RequestState
from kvmesh.errors import LostError, MeshError
from kvmesh.rpc.codec.router import from_request_list, to_request_list
from services.router.core import RouterCore
from services.router.core_settings import QueueSettings
from services.router.requests import list_requests
from tests.unit.router_fleets import ask, core, join


def fleet(**options) -> RouterCore:
    router = core(**options)
    join(router, "p1", "prefill")
    join(router, "d1", "decode")
    return router


def place(router: RouterCore, number: int, name: str = "", **options) -> None:
    with suppress(MeshError):
        router.ask("f", number, ask(name or f"r{number}", [1, 2], **options), now=0.0, wall=5.0)


def listed(router: RouterCore, **options) -> RequestList:
    """Returns the list as a client receives it."""
    options = {"model": "", "in_flight_only": False, "requests_max": 64, **options}
    return from_request_list(to_request_list(list_requests(router, **options)))


def states(router: RouterCore, **options) -> dict[str, str]:
    return {each.request_id: each.state.value for each in listed(router, **options).requests}


def report(router: RouterCore, number: int, kind: str, **options) -> None:
    router.report("f", number, Report(kind=ReportKind(kind), elapsed_s=0.1, **options))


def test_the_state_of_a_request_follows_its_reports() -> None:
    """Each report advances the state. The view has the workers, the tenant and the observed time to the first token."""
    router = fleet()
    place(router, 1, tenant="acme")
    (view,) = listed(router).requests
    assert (view.state, view.tenant, view.model) == (RequestState.PREFILLING, "acme", "demo")
    assert view.prefill is not None and view.prefill.worker_id == "p1"
    assert view.decode is not None and view.decode.worker_id == "d1"
    assert (view.prompt_tokens, view.decided_at_s) == (router.history.get("r1").ask.prompt_tokens, 5.0)
    seen = []
    for kind in ("prefilled", "first_token", "finished"):
        report(router, 1, kind, output_tokens=7 if kind == "finished" else 0)
        seen.append(states(router)["r1"])
    assert seen == ["transferring", "decoding", "finished"]
    (view,) = listed(router).requests
    assert (view.output_tokens, view.observed_ttft_s) == (7, 0.1)
    assert listed(router, in_flight_only=True) == RequestList()


def test_failures_and_refusals_have_their_reason() -> None:
    """A lost request and a refused one have the reason of their error. A cancelled one has none."""
    router = fleet()
    place(router, 1)
    place(router, 2)
    report(router, 1, "failed", error=LostError("gone"))
    report(router, 2, "cancelled")
    router.fleet.disconnected(router.fleet.workers["d1"], "silent")
    place(router, 3)
    found = {each.request_id: (each.state.value, each.reason) for each in listed(router).requests}
    assert found == {"r1": ("failed", "worker_lost"), "r2": ("cancelled", ""), "r3": ("refused", "no_worker")}


def test_queued_requests_count_until_they_leave_the_queue() -> None:
    """A withdrawn request is refused. A request whose frontend is lost is unknown, and does not stay queued."""
    router = fleet(requests_per_decode_max=1, queue=QueueSettings(requests_max=8))
    for number in (1, 2, 3):
        place(router, number)
    assert states(router) == {"r3": "queued", "r2": "queued", "r1": "prefilling"}
    found = listed(router)
    assert (found.requests_in_flight, found.requests_queued) == (1, 2)
    router.withdraw("f", 2, now=1.0)
    router.withdraw("f", 3, now=1.0, has_caller=False)
    assert states(router) == {"r3": "unknown", "r2": "refused", "r1": "prefilling"}


def test_a_request_of_a_lost_frontend_is_not_in_flight() -> None:
    """Its reservation ends after the grace time without a final report, so its state is unknown."""
    router = fleet()
    place(router, 1)
    router.on_stream_ended("f", now=0.0)
    router.expire(now=1e6)
    assert states(router) == {"r1": "unknown"}
    assert states(router, in_flight_only=True) == {}
    assert listed(router).requests_in_flight == 0


@pytest.mark.parametrize(("most", "expected"), [(2, ["r5", "r4"]), (64, ["r5", "r4", "r3", "r2", "r1"])])
def test_the_newest_come_first_and_are_limited(most: int, expected: list[str]) -> None:
    router = fleet()
    for number in range(1, 6):
        place(router, number)
    assert list(states(router, requests_max=most)) == expected
    assert states(router, model="other") == {}
