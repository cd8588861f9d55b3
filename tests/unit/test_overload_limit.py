"""While the event loop is overloaded, a tenant with many requests in flight cannot crowd out other tenants."""

import asyncio

import pytest

from kvmesh.errors import OverloadedError
from services.frontend.pipeline import tenant_turns
from services.frontend.pipeline.overload import LAG_S_MAX, LIMIT_MIN, PERIOD, OverloadLimit
from services.frontend.pipeline.tenant_turns import RequestStarts

LATE_S = 2 * LAG_S_MAX


def overloaded(in_flight: dict[str, int]) -> OverloadLimit:
    """Returns a limit that has reached its minimum."""
    limit = OverloadLimit(in_flight)
    for _ in range(100):
        limit.on_lag(LATE_S, has_waiting=True)
    return limit


def test_there_is_no_limit_while_the_loop_lag_is_low() -> None:
    limit = OverloadLimit({"flood": 1000, "other": 1})
    for _ in range(100):
        limit.on_lag(LAG_S_MAX, has_waiting=False)
    assert limit.limit is None and limit.allows("flood")


def test_only_a_tenant_above_its_share_waits() -> None:
    in_flight = {"flood": 40, "other": 1}
    limit = overloaded(in_flight)
    assert limit.limit == LIMIT_MIN
    assert not limit.allows("flood") and limit.allows("other") and limit.allows("third")
    in_flight["flood"] = 2
    assert limit.allows("flood")


def test_a_lone_tenant_is_not_limited() -> None:
    """Limiting the only active tenant would help no other tenant."""
    assert overloaded({"flood": 40}).allows("flood")


def test_a_recent_tenant_counts_between_its_requests() -> None:
    """Otherwise the tenant that floods the frontend would fill it between two requests of a tenant that sends one at a time."""
    in_flight = {"flood": 40, "other": 1}
    limit = overloaded(in_flight)
    limit.allows("other")
    del in_flight["other"]
    for _ in range(PERIOD):
        assert not limit.allows("flood")
        limit.on_lag(LATE_S, has_waiting=True)
    for _ in range(2 * PERIOD):
        limit.allows("flood")
        limit.on_lag(LATE_S, has_waiting=True)
    assert limit.allows("flood")


def test_the_limit_ends_when_the_overload_has_ended() -> None:
    in_flight = {"flood": 40, "other": 1}
    limit = overloaded(in_flight)
    for _ in range(200):
        limit.on_lag(0.0, has_waiting=False)
    assert limit.limit is None and limit.allows("flood")


async def test_waiting_requests_start_when_their_tenant_is_allowed_again() -> None:
    """Requests of a tenant that may not start do not delay requests of other tenants."""
    blocked = {"flood"}
    starts = RequestStarts(allows=lambda tenant: tenant not in blocked)
    flood = [asyncio.create_task(starts.wait("flood")) for _ in range(10)]
    await asyncio.sleep(0)
    await starts.wait("other")
    assert starts.has_waiting and not any(task.done() for task in flood)
    blocked.clear()
    starts.wake()
    await asyncio.wait(flood)
    assert not starts.has_waiting


async def test_a_request_that_waits_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_turns, "WAIT_S_MAX", 0.01)
    with pytest.raises(OverloadedError) as refusal:
        await RequestStarts(allows=lambda tenant: False).wait("flood")
    assert refusal.value.reason == "frontend_overloaded" and refusal.value.retry_after_s
