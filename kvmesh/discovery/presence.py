"""Keeps one instance registered: sends heartbeats, registers again after an outage, maintains the drain mark."""

import asyncio
import random

from kvmesh.clock import Clock, SystemClock
from kvmesh.discovery.base import Health, Registration, Registry
from kvmesh.discovery.retry import Backoff, sleep_unless
from kvmesh.discovery.settings import PresenceSettings
from kvmesh.errors import MeshError, NotFoundError, OverloadedError, UnavailableError
from kvmesh.event_log import event_logger

_log = event_logger(__name__)


class Presence:
    """The wanted state of one instance in the registry, and the task that establishes it.

    1. Setters change the wanted state (registration, health, drain mark) immediately, whether the registry answers or not.
    2. An attempt writes registration, drain mark and heartbeat in this order. So a draining instance never passes its checks without
       the mark, even after the registry lost its state.
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
        self.registration = registration
        self._health, self._note = health, note
        self._is_draining, self._drain_reason = False, ""
        # What the registry has accepted; None: unknown.
        self._written: Registration | None = None
        self._written_mark: bool | None = None
        self._attempt_lock = asyncio.Lock()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Registers, and starts the task that sends heartbeats. The task retries if the registry is unreachable.

        Raises errors that a retry would not fix: a registration that exceeds the limits, a bad token.
        """
        try:
            await self._write()
        except (UnavailableError, OverloadedError) as error:
            self._on_failure(error)
        self._task = asyncio.create_task(self._run(), name=f"presence {self.registration.instance_id}")
        self._task.add_done_callback(_log_defect)

    async def set_health(self, health: Health, note: str = "") -> None:
        """Sets the health that heartbeats report. Waits for one attempt; the task makes further ones."""
        self._health, self._note = health, note
        await self._attempt()

    async def set_draining(self, is_draining: bool, *, reason: str = "") -> None:
        """Sets or removes the drain mark. Waits for one attempt; the task makes further ones."""
        self._is_draining, self._drain_reason = is_draining, reason
        await self._attempt()

    async def update(self, registration: Registration) -> None:
        """Replaces the registration (new meta, for example) under the same id. Waits for one attempt, like the other setters."""
        if registration.instance_id != self.registration.instance_id:
            raise ValueError(f"{registration.instance_id} is not {self.registration.instance_id}")
        self.registration = registration
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
            # Waits for a running attempt, which could register the instance again.
            async with asyncio.timeout(self._settings.close_timeout_s), self._attempt_lock:
                await self._registry.deregister(self.registration.instance_id)
        except (MeshError, TimeoutError) as error:
            _log.warning("instance_left_registered", instance_id=self.registration.instance_id, detail=str(error))
        self._written = None

    async def _run(self) -> None:
        period_s = self.registration.ttl_s / self._settings.heartbeats_per_ttl
        backoff = Backoff(
            first_s=min(self._settings.backoff_first_s, period_s),
            max_s=min(self._settings.backoff_max_s, period_s),
            random=self._random,
        )
        # start() has sent the first heartbeat, unless it failed.
        pause_s = period_s if self._written is not None else backoff.next_s()
        while not await sleep_unless(self._clock, pause_s, self._closing):
            if await self._attempt():
                backoff.reset()
                # Computed again, since `update` may have changed the TTL.
                pause_s = self.registration.ttl_s / self._settings.heartbeats_per_ttl
            else:
                pause_s = backoff.next_s()

    async def _attempt(self) -> bool:
        try:
            await self._write()
        except MeshError as error:
            self._on_failure(error)
            return False
        return True

    async def _write(self) -> None:
        try:
            # The timeout covers the wait for a running attempt too, so that setters return soon.
            async with asyncio.timeout(self._settings.attempt_timeout_s), self._attempt_lock:
                if not self._closing.is_set():
                    await self._write_with_retry()
        except TimeoutError:
            raise UnavailableError("the registry did not answer in time", reason="registry_timeout") from None

    async def _write_with_retry(self) -> None:
        try:
            await self._write_once()
        except NotFoundError:
            _log.info("instance_forgotten_by_registry", instance_id=self.registration.instance_id)
            self._written = None
            await self._write_once()

    async def _write_once(self) -> None:
        wanted = self.registration
        if self._written != wanted:
            # Before the call: if it fails or is cancelled, it is unknown what the registry has.
            self._written = self._written_mark = None
            await self._registry.register(wanted)
            self._written = wanted
        if self._written_mark is not (is_draining := self._is_draining):
            # A new registration writes False too: an earlier process with this id may have left a mark.
            await self._registry.set_draining(wanted.instance_id, is_draining, reason=self._drain_reason)
            self._written_mark = is_draining
        await self._registry.heartbeat(wanted.instance_id, health=self._health, note=self._note)

    def _on_failure(self, error: MeshError) -> None:
        _log.warning(
            "heartbeat_failed", instance_id=self.registration.instance_id, reason=error.reason, detail=error.message
        )


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (defect := task.exception()) is not None:
        _log.critical("presence_ended_by_defect", exc_info=defect)
