"""The registry over Consul's HTTP API (1.8 and later), or over the embedded agent, which serves the same API.

Surprises of Consul, all seen on 1.8.7: a heartbeat for an unknown check is a 500; PUT with `release` replaces the value; a second
registration keeps the checks' states and the drain mark; check outputs without a change of status reach the catalog only every few
minutes; a read without a token under "deny" is an empty 200, not a 403.
"""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from kvmesh.clock import Clock, SystemClock
from kvmesh.discovery import limits, wire
from kvmesh.discovery.base import Entry, Health, Registration, View
from kvmesh.discovery.connection import ConsulConnection, ConsulResponse
from kvmesh.discovery.retry import Backoff, sleep_unless
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.discovery.watching import WatchState
from kvmesh.errors import MeshError, NotFoundError, OverloadedError, UnavailableError
from kvmesh.event_log import event_logger

_log = event_logger(__name__)
SLOW_S = 1.5
"""A call that takes longer than this shows that the registry was unreachable.

Services send a heartbeat every 2 s; an outage that costs them their TTL of 6 s delays at least one by more than this.
"""


class ConsulRegistry:
    """`Registry` over HTTP, for any number of tasks of one event loop. `aclose` ends its watches."""

    def __init__(
        self,
        settings: DiscoverySettings,
        clock: Clock | None = None,
        *,
        generator: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._random = (generator or random.Random()).random
        self._connection = ConsulConnection(settings)
        self._closed = asyncio.Event()
        self._calls_began_s: dict[object, float] = {}
        self._trouble_at_s = -math.inf
        self.watches_open = 0

    async def register(self, registration: Registration) -> None:
        """See `Registry.register`. InvalidRequestError names the field that exceeds Consul's limits."""
        limits.check_registration(registration)
        if registration.uses_tls and not self._settings.checks_tls:
            registration = replace(registration, is_checked=False)
        body = wire.registration_body(registration)
        await self._call("PUT", path="/v1/agent/service/register", body=body)

    async def deregister(self, instance_id: str) -> None:
        limits.check_instance_id(instance_id)
        try:
            await self._call("PUT", path=f"/v1/agent/service/deregister/{_quoted(instance_id)}")
        except NotFoundError:
            _log.debug("instance_already_absent", instance_id=instance_id)

    async def heartbeat(self, instance_id: str, *, health: Health = Health.PASSING, note: str = "") -> None:
        """See `Registry.heartbeat`. A note is cut at 1 024 characters."""
        limits.check_instance_id(instance_id)
        body = {"Status": health.value, "Output": note[: limits.NOTE_LENGTH_MAX]}
        await self._call("PUT", path=f"/v1/agent/check/update/{_quoted(wire.ttl_check_id(instance_id))}", body=body)

    async def set_draining(self, instance_id: str, is_draining: bool, *, reason: str = "") -> None:
        """See `Registry.set_draining`. A mark that is already set keeps its reason."""
        limits.check_instance_id(instance_id)
        params = {"enable": "true" if is_draining else "false", "reason": reason[: limits.NOTE_LENGTH_MAX]}
        await self._call("PUT", path=f"/v1/agent/service/maintenance/{_quoted(instance_id)}", params=params)

    async def instances(self, service: str) -> View:
        limits.check_service(service)
        response = await self._call("GET", path=f"/v1/health/service/{_quoted(service)}")
        return View(service=service, index=max(1, response.index), instances=wire.instances(service, response.body))

    async def watch(self, service: str) -> AsyncGenerator[View, None]:
        """See `Registry.watch`. Ends when this client is closed.

        A refusal by the registry (a bad token) is raised for the first query only. Later it counts as an outage: a running mesh must
        not stop because its token was revoked.

        A blocking query may outlast an outage of the network. So calls of this client that failed or were slow during the query count
        as an outage too: a stale view comes before the new one.
        """
        limits.check_service(service)
        if self.watches_open >= self._settings.watches_max:
            raise OverloadedError(f"{self.watches_open} watches are open", reason="watches_max")
        self.watches_open += 1
        try:
            async with aclosing(self._views(service)) as views:
                async for view in views:
                    yield view
        finally:
            self.watches_open -= 1

    async def _views(self, service: str) -> AsyncGenerator[View, None]:
        state = WatchState(service)
        backoff = Backoff(
            first_s=self._settings.backoff_first_s, max_s=self._settings.backoff_max_s, random=self._random
        )
        while not self._closed.is_set():
            queried_at_s = self._clock.now()
            try:
                response = await self._query(service, state.index)
                instances = wire.instances(service, response.body)
                was_away = state.has_seen and self._had_trouble_since(queried_at_s)
                # `on_failure` drops the index; `on_response` sets the new one.
                if was_away and (stale := state.on_failure()) is not None:
                    yield stale
                view = state.on_response(response.index, instances)
                backoff.reset()
                # A service that changes all the time is read once per interval.
                pause_s = queried_at_s + self._settings.watch_interval_min_s - self._clock.now()
            except MeshError as error:
                if self._closed.is_set():
                    return
                if not state.has_seen and not isinstance(error, UnavailableError | OverloadedError):
                    raise
                view, pause_s = state.on_failure(), backoff.next_s()
                _log.warning("registry_watch_failed", consul_service=service, reason=error.reason, detail=error.message)
            if view is not None:
                yield view
            if pause_s > 0:
                await sleep_unless(self._clock, pause_s, self._closed)

    async def _query(self, service: str, index: int) -> ConsulResponse:
        path = f"/v1/health/service/{_quoted(service)}"
        if index == 0:
            return await self._call("GET", path=path)
        return await self._counted(self._connection.wait(path, index, random=self._random))

    async def get(self, key: str) -> Entry | None:
        limits.check_key(key)
        try:
            response = await self._call("GET", path=f"/v1/kv/{_quoted(key)}")
        except NotFoundError:
            return None
        return next(iter(wire.entries(response.body)), None)

    async def put(self, key: str, value: bytes, *, expected_index: int | None = None) -> bool:
        return await self._write(key, value, {} if expected_index is None else {"cas": str(expected_index)})

    async def delete(self, key: str) -> None:
        limits.check_key(key)
        await self._call("DELETE", path=f"/v1/kv/{_quoted(key)}")

    async def create_session(self, *, name: str, ttl_s: float, lock_delay_s: float = 0.0) -> str:
        """See `Registry.create_session`. Consul expires a session between one and two TTLs after its last renewal."""
        limits.check_between("ttl_s", ttl_s, low=limits.SESSION_TTL_MIN_S, high=limits.SESSION_TTL_MAX_S)
        limits.check_between("lock_delay_s", lock_delay_s, low=0.0, high=limits.LOCK_DELAY_MAX_S)
        body = {
            "Name": name,
            "TTL": wire.duration_text(ttl_s),
            "LockDelay": wire.duration_text(lock_delay_s),
            "Behavior": "release",
        }
        return wire.session_id((await self._call("PUT", path="/v1/session/create", body=body)).body)

    async def renew_session(self, session_id: str) -> None:
        await self._call("PUT", path=f"/v1/session/renew/{_quoted(session_id)}")

    async def destroy_session(self, session_id: str) -> None:
        try:
            await self._call("PUT", path=f"/v1/session/destroy/{_quoted(session_id)}")
        except NotFoundError:
            _log.debug("session_already_absent")

    async def acquire(self, key: str, session_id: str, value: bytes = b"") -> bool:
        """See `Registry.acquire`. The holder may repeat it to set a new value."""
        return await self._write(key, value, {"acquire": session_id})

    async def release(self, key: str, session_id: str) -> bool:
        """See `Registry.release`. Keeps the value: reads it first, since Consul replaces the value with the request's body.

        Only the holder may write a key that is used as a lock, so the value does not change in between.
        """
        held = await self.get(key)
        if held is None or held.session != session_id:
            return False
        return await self._write(key, held.value, {"release": session_id})

    async def aclose(self) -> None:
        self._closed.set()
        await self._connection.aclose()

    async def _write(self, key: str, value: bytes, params: dict[str, str]) -> bool:
        limits.check_key(key)
        limits.check_value(value)
        return wire.truth((await self._call("PUT", path=f"/v1/kv/{_quoted(key)}", params=params, body=value)).body)

    async def _call(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: bytes | Mapping[str, Any] = b""
    ) -> ConsulResponse:
        call, began_s = object(), self._clock.now()
        # While the call runs, so that `_had_trouble_since` also sees a call that hangs.
        self._calls_began_s[call] = began_s
        try:
            return await self._counted(self._connection.call(method, path, params=params, body=body))
        finally:
            del self._calls_began_s[call]
            if self._clock.now() - began_s > SLOW_S:
                self._trouble_at_s = self._clock.now()

    def _had_trouble_since(self, since_s: float) -> bool:
        """Returns whether a call has failed or ended late since then, or has waited for long now."""
        late_s = self._clock.now() - SLOW_S
        return self._trouble_at_s >= since_s or any(began_s < late_s for began_s in self._calls_began_s.values())

    async def _counted(self, call: Awaitable[ConsulResponse]) -> ConsulResponse:
        try:
            return await call
        except UnavailableError:
            self._trouble_at_s = self._clock.now()
            raise


def _quoted(segment: str) -> str:
    return quote(segment, safe="")
