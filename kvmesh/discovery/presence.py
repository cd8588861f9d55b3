"""Keeps one instance registered: heartbeats, comes back when forgotten or after an outage, carries the drain mark."""

import asyncio
import logging
import random
from dataclasses import dataclass

from kvmesh.clock import Clock, SystemClock
from kvmesh.discovery.backoff import Backoff
from kvmesh.discovery.base import Health, Registration, Registry
from kvmesh.discovery.settings import PresenceSettings
from kvmesh.discovery.waiting import sleep_unless
from kvmesh.errors import MeshError, NotFoundError, OverloadedError, UnavailableError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceStatistics:
    """`is_registered` is the state after the last answer of the registry."""

    is_registered: bool
    is_draining: bool
    registrations: int
    heartbeats: int
    failures: int


class Presence:
    """What should stand in the registry about this instance, and the task that sees to it.

    1. What is wanted (registration, health, drain mark) is set here at once, whether the registry answers or not.
    2. What stands there is brought to it in the order registration, drain mark, heartbeat, so that an instance that
       drains never passes its checks without the mark, not even after the registry has forgotten it.
    """

    def __init__(
        self,
        registry: Registry,
        registration: Registration,
        *,
        settings: PresenceSettings | None = None,
        clock: Clock | None = None,
        generator: random.Random | None = None,
        health: Health = Health.PASSING,
        note: str = "",
    ) -> None:
        self._registry = registry
        self._settings = settings or PresenceSettings()
        self._clock = clock or SystemClock()
        self._random = (generator or random.Random()).random
        self._wanted = registration
        self._health, self._note = health, note
        self._is_draining, self._drain_reason = False, ""
        self._standing: Registration | None = None
        self._standing_mark: bool | None = None
        self._one_at_a_time = asyncio.Lock()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._registrations = self._heartbeats = self._failures = 0

    @property
    def registration(self) -> Registration:
        return self._wanted

    def statistics(self) -> PresenceStatistics:
        return PresenceStatistics(
            is_registered=self._standing is not None,
            is_draining=self._is_draining,
            registrations=self._registrations,
            heartbeats=self._heartbeats,
            failures=self._failures,
        )

    async def start(self) -> None:
        """Registers and goes on in a task. A registry that cannot be reached now is tried again there.

        Raises what trying again would not mend: a registration beyond the limits, a bad token.
        """
        try:
            await self._bring_about()
        except (UnavailableError, OverloadedError) as error:
            self._failed(error)
        self._task = asyncio.create_task(self._stay(), name=f"presence {self._wanted.instance_id}")
        self._task.add_done_callback(_log_defect)

    async def set_health(self, health: Health, note: str = "") -> None:
        """Says how the instance is, now and with every heartbeat. Waits for one attempt; the task makes the others."""
        self._health, self._note = health, note
        await self._attempt()

    async def set_draining(self, is_draining: bool, *, reason: str = "") -> None:
        """Sets or takes off the drain mark. Waits for one attempt; the task makes the others."""
        self._is_draining, self._drain_reason = is_draining, reason
        await self._attempt()

    async def update(self, registration: Registration) -> None:
        """Replaces what is registered (new meta, say) under the same id. Waits for one attempt, as above."""
        if registration.instance_id != self._wanted.instance_id:
            raise ValueError(f"{registration.instance_id} is not {self._wanted.instance_id}")
        self._wanted = registration
        await self._attempt()

    async def aclose(self) -> None:
        """Ends the task and deregisters within `close_timeout_s`. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        try:
            # In turn, so that no attempt under way registers again what has signed off.
            async with asyncio.timeout(self._settings.close_timeout_s), self._one_at_a_time:
                await self._registry.deregister(self._wanted.instance_id)
        except (MeshError, TimeoutError) as error:
            _log.warning("instance_left_registered", extra={"instance_id": self._wanted.instance_id, "why": str(error)})
        self._standing = None

    async def _stay(self) -> None:
        period_s = self._wanted.ttl_s / self._settings.heartbeats_per_ttl
        backoff = Backoff(
            first_s=min(self._settings.backoff_first_s, period_s),
            max_s=min(self._settings.backoff_max_s, period_s),
            random=self._random,
        )
        # The first heartbeat was sent by start(), unless that failed.
        pause_s = period_s if self._standing is not None else backoff.next_s()
        while not await sleep_unless(self._clock, pause_s, self._closing):
            if await self._attempt():
                backoff.reset()
                pause_s = self._wanted.ttl_s / self._settings.heartbeats_per_ttl
            else:
                pause_s = backoff.next_s()

    async def _attempt(self) -> bool:
        try:
            await self._bring_about()
        except MeshError as error:
            self._failed(error)
            return False
        return True

    async def _bring_about(self) -> None:
        try:
            # Also bounds the wait for a running attempt, so that callers of the setters return soon.
            async with asyncio.timeout(self._settings.attempt_timeout_s), self._one_at_a_time:
                if not self._closing.is_set():
                    await self._bring_about_unless_forgotten()
        except TimeoutError:
            raise UnavailableError("the registry did not answer in time", reason="registry_timeout") from None

    async def _bring_about_unless_forgotten(self) -> None:
        try:
            await self._bring_about_once()
        except NotFoundError:
            _log.info("instance_forgotten_by_registry", extra={"instance_id": self._wanted.instance_id})
            self._standing = None
            await self._bring_about_once()

    async def _bring_about_once(self) -> None:
        wanted = self._wanted
        if self._standing != wanted:
            self._standing = self._standing_mark = None
            await self._registry.register(wanted)
            self._standing = wanted
            self._registrations += 1
        if self._standing_mark is not (is_draining := self._is_draining):
            # Also False on registering: a mark may be left from an earlier process with this id.
            await self._registry.set_draining(wanted.instance_id, is_draining, reason=self._drain_reason)
            self._standing_mark = is_draining
        await self._registry.heartbeat(wanted.instance_id, health=self._health, note=self._note)
        self._heartbeats += 1

    def _failed(self, error: MeshError) -> None:
        self._failures += 1
        extra = {"instance_id": self._wanted.instance_id, "reason": error.reason, "why": error.message}
        _log.warning("heartbeat_failed", extra=extra)


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (defect := task.exception()) is not None:
        _log.critical("presence_ended_by_defect", exc_info=defect)
