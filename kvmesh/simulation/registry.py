"""A registry without sockets, for whole meshes on one event loop: direct calls on the embedded agent's state.

    agent = MemoryAgent(clock=clock, new_session_id=ids, connect=lambda check: network.channel(check.grpc_target))
    await agent.start()
    registry = agent.registry()

It shares state, limits and shapes with the embedded agent and passes the same conformance suite.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

import grpc.aio

from kvmesh.clock import Clock, SystemClock
from kvmesh.discovery import limits, wire
from kvmesh.discovery.agent import requests, shapes
from kvmesh.discovery.agent.keys import KeyRecord, SessionDefinition
from kvmesh.discovery.agent.live import LiveState
from kvmesh.discovery.agent.probes import Probes
from kvmesh.discovery.agent.records import CheckDefinition
from kvmesh.discovery.agent.state import AgentState
from kvmesh.discovery.base import Entry, Health, Instance, Registration, View
from kvmesh.discovery.settings import AgentSettings
from kvmesh.discovery.watching import WatchState
from kvmesh.errors import UnavailableError

T = TypeVar("T")


class MemoryAgent:
    """The agent. `connect` returns the channel of a gRPC check; without it checks use TCP, as the embedded agent's do."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        settings: AgentSettings | None = None,
        new_session_id: Callable[[], str] = lambda: str(uuid.uuid4()),
        connect: Callable[[CheckDefinition], grpc.aio.Channel] | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self.settings = settings or AgentSettings()
        self.new_session_id = new_session_id
        self.live = LiveState(AgentState(self.settings), self._clock)
        self._probes = Probes(self.live, self._clock, probes_max=self.settings.probes_max, connect=connect)
        self._tasks: list[asyncio.Task[None]] = []
        self._seen: dict[str, tuple[int, Sequence[Instance]]] = {}
        """By service: what was read last."""
        self.is_away = False
        """True: no client reaches it. Set by `set_away`."""
        self._node = shapes.Node(node_id="memory", name=self.settings.node_name, address="memory", port=0, index=1)

    def registry(self) -> "MemoryRegistry":
        """Returns a client. Each process of a mesh has its own, so that one can be cut off alone."""
        return MemoryRegistry(self)

    def set_away(self, is_away: bool) -> None:
        """Cuts all clients off, or ends that."""
        self.is_away = is_away
        self.live.wake()

    def lose_state(self) -> None:
        """Starts again with an empty state and small indexes, as Consul does without its data directory."""
        self.live.state = AgentState(self.settings)
        # The new state counts indexes from the start again, so an old answer could have the index of a new one.
        self._seen.clear()
        self.live.wake()

    def seen(self, service: str) -> tuple[int, Sequence[Instance]]:
        """Returns a service's index and instances, as a client of the HTTP API would read them."""
        catalog = self.live.state.catalog
        index = catalog.name_index(service)
        known = self._seen.get(service)
        if known is None or known[0] != index:
            # Many watches read the same answer: 7 % of a run.
            entries = [shapes.health_entry(self._node, found) for found in catalog.instances(service)]
            known = self._seen[service] = index, wire.instances(service, json.dumps(entries).encode())
        return known

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self.live.run(), name="memory-agent-deadlines"),
            asyncio.create_task(self._probes.run(), name="memory-agent-checks"),
        ]

    async def aclose(self) -> None:
        self.live.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class MemoryRegistry:
    """Implements `Registry` on an agent of the same event loop. Calls take one iteration of the loop and no time."""

    def __init__(self, agent: MemoryAgent) -> None:
        self._agent = agent
        self.watches_open = 0
        self._is_closed = False
        self._is_reachable = True

    @property
    def is_reachable(self) -> bool:
        """False: every call fails as unavailable, and watches yield their last view as stale."""
        return self._is_reachable and not self._is_closed and not self._agent.is_away

    def set_reachable(self, is_reachable: bool) -> None:
        """Cuts this client off from the agent, or ends that."""
        self._is_reachable = is_reachable
        self._agent.live.wake()

    async def register(self, registration: Registration) -> None:
        limits.check_registration(registration)
        body = wire.registration_body(registration, check_timeout_s=limits.CHECK_TIMEOUT_DEFAULT_S)
        definition = requests.service_definition(json.dumps(body).encode())
        await self._change(lambda state, now: state.catalog.register(definition, now))

    async def deregister(self, instance_id: str) -> None:
        limits.check_instance_id(instance_id)
        await self._change(lambda state, now: state.catalog.deregister(instance_id))

    async def heartbeat(self, instance_id: str, *, health: Health = Health.PASSING, note: str = "") -> None:
        limits.check_instance_id(instance_id)
        check_id, output = wire.ttl_check_id(instance_id), note[: limits.NOTE_LENGTH_MAX]
        await self._change(lambda state, now: state.catalog.heartbeat(check_id, health, output, now=now))

    async def set_draining(self, instance_id: str, is_draining: bool, *, reason: str = "") -> None:
        """See `Registry.set_draining`. A second call does not change the reason."""
        limits.check_instance_id(instance_id)
        words = reason[: limits.NOTE_LENGTH_MAX]
        await self._change(lambda state, now: state.catalog.set_maintenance(instance_id, is_draining, words))

    async def instances(self, service: str) -> View:
        limits.check_service(service)
        index, instances = await self._change(lambda state, now: self._agent.seen(service))
        return View(service=service, index=max(1, index), instances=instances)

    async def watch(self, service: str) -> AsyncGenerator[View, None]:
        """See `Registry.watch`. Ends when the registry or its agent is closed."""
        limits.check_service(service)
        self.watches_open += 1
        watching, live = WatchState(service), self._agent.live
        try:
            while not self._is_closed and not live.is_closing:
                view = watching.on_response(*self._agent.seen(service)) if self.is_reachable else watching.on_failure()
                if view is not None:
                    yield view
                    # A change while the consumer handled the view did not wake this task.
                    continue
                await live.wait_change()
        finally:
            self.watches_open -= 1

    async def get(self, key: str) -> Entry | None:
        limits.check_key(key)
        record = await self._change(lambda state, now: state.keys.get(key))
        return None if record is None else _entry(record)

    async def put(self, key: str, value: bytes, *, expected_index: int | None = None) -> bool:
        self._check_write(key, value)
        return await self._change(lambda state, now: state.keys.put(key, value, expected_index=expected_index))

    async def delete(self, key: str) -> None:
        limits.check_key(key)
        await self._change(lambda state, now: state.keys.delete(key))

    async def create_session(self, *, name: str, ttl_s: float, lock_delay_s: float = 0.0) -> str:
        limits.check_between("ttl_s", ttl_s, low=limits.SESSION_TTL_MIN_S, high=limits.SESSION_TTL_MAX_S)
        limits.check_between("lock_delay_s", lock_delay_s, low=0.0, high=limits.LOCK_DELAY_MAX_S)
        definition = SessionDefinition(name=name, ttl_s=ttl_s, lock_delay_s=lock_delay_s)
        session_id = self._agent.new_session_id()
        await self._change(lambda state, now: state.sessions.create(session_id, definition, now))
        return session_id

    async def renew_session(self, session_id: str) -> None:
        await self._change(lambda state, now: state.sessions.renew(session_id, now))

    async def destroy_session(self, session_id: str) -> None:
        await self._change(lambda state, now: state.destroy_session(session_id, now))

    async def acquire(self, key: str, session_id: str, value: bytes = b"") -> bool:
        """See `Registry.acquire`. Again by the holder: True, with the new value."""
        self._check_write(key, value)
        return await self._change(lambda state, now: state.acquire(key, session_id=session_id, value=value, now=now))

    async def release(self, key: str, session_id: str) -> bool:
        limits.check_key(key)

        def give_back(state: AgentState, now: float) -> bool:
            held = state.keys.get(key)
            return held is not None and state.keys.release(key, session_id=session_id, value=held.value)

        return await self._change(give_back)

    async def aclose(self) -> None:
        self._is_closed = True
        self._agent.live.wake()

    def _check_write(self, key: str, value: bytes) -> None:
        limits.check_key(key)
        limits.check_value(value)

    async def _change(self, decide: Callable[[AgentState, float], T]) -> T:
        # A call of the real registry never returns within the same iteration.
        await asyncio.sleep(0)
        if not self.is_reachable:
            raise UnavailableError("the registry cannot be reached", reason="registry_unreachable")
        return self._agent.live.change(decide)


def _entry(record: KeyRecord) -> Entry:
    return Entry(key=record.key, value=record.value, modify_index=record.modify_index, session=record.session)
