"""Members after an outage of the registry: which members are kept, for how long, and what removes them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import pytest

from kvmesh.discovery.base import DECODE, Health, Instance, Registry, View
from kvmesh.discovery.members import Members, watch_members
from tests.conformance.manual_clock import ManualClock

HOLD_S = 30.0


def member(name: str, *, health: Health = Health.PASSING, epoch: str = "1", is_draining: bool = False) -> Instance:
    return Instance(
        service=DECODE,
        instance_id=name,
        host="192.0.2.1",
        port=1,
        meta={"epoch": epoch},
        tags=(),
        health=health,
        is_draining=is_draining,
    )


def view(*instances: Instance, is_stale: bool = False) -> View:
    return View(service=DECODE, index=1, instances=instances, is_stale=is_stale)


def after_outage(*known: Instance) -> Members:
    members = Members(hold_s=HOLD_S)
    members.on_view(view(*known), 0.0)
    assert members.on_view(view(*known, is_stale=True), 1.0).is_stale
    return members


A, B = member("a"), member("b")


def test_members_are_kept_when_the_registry_returns_empty() -> None:
    """An empty registry after an outage removes no member until the hold ends."""
    members = after_outage(A, B)
    assert members.on_view(view(), 2.0).instances == (A, B)
    assert members.left_s(2.0) == HOLD_S
    assert members.on_time(2.0 + HOLD_S - 0.1) is None
    ended = members.on_time(2.0 + HOLD_S)
    assert ended is not None
    assert ended.instances == ()
    assert members.left_s(2.0 + HOLD_S) is None


def test_critical_members_count_as_passing_after_an_outage() -> None:
    """A new registration is critical until its first check. Its current metadata and drain mark apply."""
    members = after_outage(A, B)
    marked = member("b", health=Health.CRITICAL, is_draining=True)
    shown = members.on_view(view(member("a", health=Health.CRITICAL), marked), 2.0).instances
    assert shown == (A, replace(B, is_draining=True))


@pytest.mark.parametrize(
    "returned",
    [member("a", health=Health.CRITICAL, epoch="2"), replace(member("a", health=Health.CRITICAL), port=2)],
)
def test_a_replaced_member_is_not_held(returned: Instance) -> None:
    """A member that moved or has a new epoch is not held, and the registry's listing applies."""
    members = after_outage(A, B)
    members.on_view(view(), 2.0)
    assert members.on_view(view(returned), 3.0).instances == (returned, B)
    assert members.on_view(view(), 4.0).instances == (B,)


@pytest.mark.parametrize("lost", [(), (member("a", health=Health.CRITICAL),)])
def test_a_member_is_held_after_the_registry_listed_it_unchanged(lost: tuple[Instance, ...]) -> None:
    """A restarted agent first repeats the servers' state, then writes its own, in which no check has passed or nothing is registered."""
    members = after_outage(A)
    assert members.on_view(view(A), 2.0).instances == (A,)
    assert members.on_view(view(*lost), 2.1).instances == (A,)
    assert members.on_time(2.0 + HOLD_S) == view(*lost)


def test_a_member_that_drained_and_left_is_not_held() -> None:
    """A worker that shuts down in order during the hold is removed immediately."""
    members = after_outage(A, B)
    marked = replace(A, is_draining=True)
    assert members.on_view(view(marked, B), 2.0).instances == (marked, B)
    assert members.on_view(view(B), 3.0).instances == (B,)


def test_no_member_is_held_without_an_outage() -> None:
    """A member that leaves or turns critical is removed immediately."""
    members = Members(hold_s=HOLD_S)
    members.on_view(view(A, B), 0.0)
    ill = member("b", health=Health.CRITICAL)
    assert members.on_view(view(ill), 1.0).instances == (ill,)


def test_a_member_that_was_critical_is_not_held() -> None:
    """An outage does not make a critical member healthy."""
    members = after_outage(member("a", health=Health.CRITICAL), B)
    assert members.on_view(view(), 2.0).instances == (B,)


def test_a_second_outage_restarts_the_hold() -> None:
    """A hold does not end during an outage. It starts again afterwards."""
    members = after_outage(A)
    members.on_view(view(), 2.0)
    assert members.on_view(view(is_stale=True), 3.0).instances == (A,)
    assert members.left_s(100.0) is None
    assert members.on_time(100.0) is None
    assert members.on_view(view(), 100.0).instances == (A,)
    assert members.on_view(view(), 100.0 + HOLD_S).instances == ()


class Source:
    """A registry whose watch yields the given views and then waits."""

    def __init__(self, *views: View) -> None:
        self.views = views
        self.is_closed = False

    async def watch(self, service: str) -> AsyncGenerator[View, None]:
        try:
            for each in self.views:
                yield each
            await asyncio.Event().wait()
        finally:
            self.is_closed = True


async def test_a_watch_yields_when_the_hold_ends() -> None:
    """The end of a hold yields a view without a change in the registry. Closing the watch closes the registry's watch."""
    clock, source = ManualClock(), Source(view(A), view(A, is_stale=True), view())
    async with aclosing(watch_members(cast(Registry, source), DECODE, clock, hold_s=HOLD_S)) as views:
        assert [(await anext(views)).instances for _ in source.views] == [(A,)] * 3
        ending = asyncio.ensure_future(anext(views))
        await clock.advance(HOLD_S)
        assert (await ending).instances == ()
    assert source.is_closed
