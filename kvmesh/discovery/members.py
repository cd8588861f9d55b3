"""The members of one service as its peers use them: the registry's views, corrected for outages of the registry.

A registry that returns after an outage may have lost its state, or lists everything as critical because no heartbeats arrived. A Consul
agent that restarts first repeats the servers' state, in which all members pass, and then writes its own state, in which their checks have
not run yet. In both cases the members still run.

1. During an outage the last members stay; the view is marked stale.
2. For `hold_s` after an outage, a member that is missing or critical, and was not critical before, is *held*: its old state stays.
3. A member is no longer held when the registry lists it at another address or with another epoch, or when it leaves after the registry
   has listed it with a drain mark.
4. A drain mark takes effect immediately.

A member that dies during the outage or the hold is held too. Its peers notice its death by broken streams.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kvmesh.clock import Clock
from kvmesh.discovery.base import Health, Instance, Registry, View

HOLD_S = 30.0
"""Services register again within a heartbeat and a pause between attempts (2 s each); their gRPC check takes another 2 s."""


class Members:
    """The rules, without I/O. `now` is a time in seconds on one scale."""

    def __init__(self, *, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._listed: View | None = None
        """The newest view of the registry that is not stale."""
        self._shown: Sequence[Instance] = ()
        self._held: dict[str, Instance] = {}
        self._leaving: set[str] = set()
        """Members that were listed with a drain mark since the outage."""
        self._until_s: float | None = None
        """When the hold ends. None: during an outage, or without a hold."""

    def on_view(self, view: View, now: float) -> View:
        """Returns the members at this view."""
        if view.is_stale:
            self._held = {each.instance_id: each for each in self._shown if each.health is not Health.CRITICAL}
            self._leaving.clear()
            self._until_s = None
            return replace(view, instances=self._shown)
        if self._held and self._until_s is None:
            self._until_s = now + self._hold_s
        self._listed = view
        return self.on_time(now) or self._members(view)

    def left_s(self, now: float) -> float | None:
        """Returns the seconds until `on_time` must be called. None: no member is held, or the registry is unreachable."""
        return None if self._until_s is None else max(0.0, self._until_s - now)

    def on_time(self, now: float) -> View | None:
        """Returns the members without those whose hold ended. None: no hold has ended."""
        if self._listed is None or self._until_s is None or now < self._until_s:
            return None
        self._held.clear()
        return self._members(self._listed)

    def _members(self, view: View) -> View:
        listed = {each.instance_id: each for each in view.instances}
        self._leaving |= {name for name in self._held.keys() & listed.keys() if listed[name].is_draining}
        # Marked as draining and then removed: they have stopped and are not held.
        left = self._leaving - listed.keys()
        held = {name: _held(known, listed.get(name)) for name, known in self._held.items() if name not in left}
        self._held = {name: each for name, each in held.items() if each is not None}
        if not self._held:
            self._until_s = None
        members = listed | self._held
        self._shown = tuple(members[name] for name in sorted(members))
        return replace(view, instances=self._shown)


def _held(known: Instance, listed: Instance | None) -> Instance | None:
    """Returns the member as its peers use it during a hold. None: it is as the registry lists it."""
    if listed is None:
        return known
    if listed.address != known.address or listed.meta.get("epoch") != known.meta.get("epoch"):
        return None
    # Its present meta and drain mark count.
    return replace(listed, health=known.health) if listed.health is Health.CRITICAL else listed


async def watch_members(
    registry: Registry, service: str, clock: Clock, *, hold_s: float = HOLD_S
) -> AsyncGenerator[View, None]:
    """`Registry.watch` by the rules above. Also yields when a hold ends."""
    members = Members(hold_s=hold_s)
    async with aclosing(registry.watch(service)) as views:
        while True:
            reading = asyncio.ensure_future(_next(views))
            try:
                while not await _wait(reading, members.left_s(clock.now()), clock):
                    if (view := members.on_time(clock.now())) is not None:
                        yield view
                newest = reading.result()
            finally:
                await _end(reading)
            if newest is None:
                return
            yield members.on_view(newest, clock.now())


async def _next(views: AsyncGenerator[View, None]) -> View | None:
    return await anext(views, None)


async def _wait(reading: "asyncio.Future[View | None]", limit_s: float | None, clock: Clock) -> bool:
    """Returns whether the view was read, after at most `limit_s`."""
    if limit_s is None:
        await asyncio.wait([reading])
        return True
    timer = asyncio.ensure_future(clock.sleep(limit_s))
    either: set[asyncio.Future[Any]] = {reading, timer}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
    return reading.done()


async def _end(reading: "asyncio.Future[View | None]") -> None:
    """The generator cannot be closed while it runs."""
    if not reading.done():
        reading.cancel()
        await asyncio.wait([reading])
