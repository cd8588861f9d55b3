"""What Presence guarantees, on every registry: an instance is registered while it runs, with its drain mark, and deregistered afterwards."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import pytest

from kvmesh.clock import SystemClock
from kvmesh.discovery.base import Health, Instance, Registration, Registry, View
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.members import watch_members
from kvmesh.discovery.presence import Presence
from kvmesh.discovery.settings import DiscoverySettings, PresenceSettings
from kvmesh.errors import InvalidRequestError, UnauthenticatedError
from tests.conformance.conftest import Agent
from tests.conformance.health_server import HealthServer
from tests.conformance.manual_clock import ManualClock, settle
from tests.patience import PATIENCE_S

TTL_S = 4.5
"""Heartbeats are sent three times as often. One may be 3 s late, as on a busy machine."""
LONG_TTL_S = 12.0
"""For members that must never be critical: a heartbeat may be 8 s late."""


@pytest.fixture
def mine(server: HealthServer) -> Registration:
    service = f"svc-{uuid.uuid4().hex[:12]}"
    return Registration(
        service=service,
        instance_id=f"{service}-1",
        host="127.0.0.1",
        port=server.port,
        ttl_s=TTL_S,
        check_interval_s=0.2,
    )


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as one:
        yield one


def presence(stack: AsyncExitStack, registry: Registry, mine: Registration) -> Presence:
    one = Presence(
        registry, mine, settings=PresenceSettings(attempt_timeout_s=30.0, backoff_max_s=0.2, close_timeout_s=30.0)
    )
    stack.push_async_callback(one.aclose)
    return one


async def until(registry: Registry, service: str, is_true: Callable[[Instance], bool]) -> Instance:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        view = await registry.instances(service)
        if len(view.instances) == 1 and is_true(view.instances[0]):
            return view.instances[0]
        assert time.monotonic() < deadline, f"still {view}"
        await asyncio.sleep(0.05)


async def wait_until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():
            await asyncio.sleep(0.02)


def takes_requests(instance: Instance) -> bool:
    return instance.takes_requests


async def test_registers_until_closed(registry: ConsulRegistry, mine: Registration, stack: AsyncExitStack) -> None:
    """The instance passes for longer than its TTL, and is deregistered when closed. Closing twice is no error."""
    one = presence(stack, registry, mine)
    await one.start()
    await until(registry, mine.service, takes_requests)
    for _ in range(12):
        await asyncio.sleep(TTL_S / 10)
        # On a busy machine a heartbeat may be late. Without heartbeats the instance never takes requests again.
        await until(registry, mine.service, takes_requests)
    await one.aclose()
    assert (await registry.instances(mine.service)).instances == ()
    await one.aclose()


async def test_registers_again_when_removed(
    registry: ConsulRegistry, mine: Registration, stack: AsyncExitStack
) -> None:
    """An instance that the registry has removed registers again at the next heartbeat."""
    one = presence(stack, registry, mine)
    await one.start()
    await until(registry, mine.service, takes_requests)
    await registry.deregister(mine.instance_id)
    await until(registry, mine.service, takes_requests)


async def test_a_draining_instance_registers_again_as_draining(
    agent: Agent, mine: Registration, stack: AsyncExitStack
) -> None:
    """When the registry loses its state, a draining instance never appears ready while it registers again."""
    registry = agent.client()
    one = presence(stack, registry, mine)
    await one.start()
    await until(registry, mine.service, takes_requests)
    await one.set_draining(True, reason="going")
    seen = await until(registry, mine.service, lambda instance: instance.is_draining)
    assert seen.notes == "going"
    views: list[View] = []

    async def look() -> None:
        async with aclosing(registry.watch(mine.service)) as watch:
            async for view in watch:
                views.append(view)

    def is_back(view: View) -> bool:
        return [instance.health for instance in view.instances if instance.is_draining] == [Health.PASSING]

    looking = asyncio.create_task(look())
    await wait_until(lambda: len(views) > 0)
    await agent.proxy.refuse()
    await wait_until(lambda: views[-1].is_stale)
    await agent.lose_state()
    await wait_until(lambda: not views[-1].is_stale and is_back(views[-1]))
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert not any(instance.takes_requests for view in views for instance in view.instances)
    await one.set_draining(False)
    await until(registry, mine.service, takes_requests)


async def test_a_drain_mark_of_an_earlier_process_is_removed(
    registry: ConsulRegistry, mine: Registration, stack: AsyncExitStack
) -> None:
    """A process that died while it drained leaves its mark. The next process with its id still takes requests."""
    await registry.register(mine)
    await registry.set_draining(mine.instance_id, True, reason="going")
    await until(registry, mine.service, lambda instance: instance.is_draining)
    one = presence(stack, registry, mine)
    await one.start()
    seen = await until(registry, mine.service, takes_requests)
    assert not seen.is_draining


async def test_starts_without_a_registry(
    agent: Agent, mine: Registration, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """A service starts while the registry is unreachable, and registers once it is reachable."""
    registry = agent.client()
    await agent.proxy.refuse()
    one = presence(stack, registry, mine)
    await one.start()
    await wait_until(lambda: caplog.messages.count("heartbeat_failed") >= 2)
    await agent.proxy.resume()
    await until(registry, mine.service, takes_requests)


async def test_changes_during_an_outage_are_applied_afterwards(
    agent: Agent, mine: Registration, stack: AsyncExitStack
) -> None:
    """The registry gets the drain mark, health and meta that were set during an outage once it is reachable."""
    registry = agent.client()
    one = presence(stack, registry, mine)
    await one.start()
    await until(registry, mine.service, takes_requests)
    await agent.proxy.refuse()
    await one.set_draining(True, reason="later")
    await one.set_health(Health.WARNING, "tired")
    await one.update(replace(mine, meta={"role": "decode"}))
    await agent.proxy.resume()

    def has_all(instance: Instance) -> bool:
        # Health is written last, after the registration and the drain mark.
        return instance.is_draining and "role" in instance.meta and instance.health is Health.WARNING

    await until(registry, mine.service, has_all)


async def test_update_replaces_meta(registry: ConsulRegistry, mine: Registration, stack: AsyncExitStack) -> None:
    """New meta reaches the registry without a gap in the instance's health. An update to another id raises ValueError."""
    one = presence(stack, registry, mine)
    await one.start()
    await until(registry, mine.service, takes_requests)
    await one.update(replace(mine, meta={"role": "prefill"}))
    seen = await until(registry, mine.service, lambda instance: instance.meta == {"role": "prefill"})
    assert seen.takes_requests
    assert one.registration.meta == {"role": "prefill"}
    with pytest.raises(ValueError, match="is not"):
        await one.update(replace(mine, instance_id="another"))


async def test_start_raises_permanent_errors(agent: Agent, mine: Registration, stack: AsyncExitStack) -> None:
    """A registration beyond the limits fails the start, not a later heartbeat in the background."""
    one = presence(stack, agent.client(), replace(mine, meta={"k": "v" * 513}))
    with pytest.raises(InvalidRequestError) as refusal:
        await one.start()
    assert refusal.value.field == "meta.k"


async def test_start_with_a_wrong_token_fails(guarded_agent: Agent, mine: Registration, stack: AsyncExitStack) -> None:
    """A token that the registry does not know fails the start."""
    one = presence(stack, guarded_agent.client(token=str(uuid.uuid4())), mine)
    with pytest.raises(UnauthenticatedError):
        await one.start()


async def test_close_is_bounded(agent: Agent, mine: Registration) -> None:
    """With a registry that hangs, closing takes no longer than the close timeout, and leaves no task."""
    registry = agent.client(call_timeout_s=600.0)
    one = Presence(registry, mine, settings=PresenceSettings(close_timeout_s=0.3))
    await one.start()
    agent.proxy.hang()
    await asyncio.sleep(0.5)
    # No other limit would end it in time.
    async with asyncio.timeout(PATIENCE_S):
        await one.aclose()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("presence")]
    await agent.proxy.resume()


async def test_setting_the_drain_mark_is_bounded(agent: Agent, mine: Registration, stack: AsyncExitStack) -> None:
    """While the registry hangs, setting the drain mark takes no longer than one attempt."""
    settings = PresenceSettings(attempt_timeout_s=0.4, close_timeout_s=0.4, backoff_max_s=0.1)
    one = Presence(agent.client(call_timeout_s=600.0), mine, settings=settings)
    stack.push_async_callback(one.aclose)
    await one.start()
    agent.proxy.hang()
    await asyncio.sleep(0.5)
    async with asyncio.timeout(PATIENCE_S):
        await one.set_draining(True)
    await agent.proxy.resume()
    await until(agent.client(), mine.service, lambda instance: instance.is_draining)


async def test_cancelled_close_stays_cancelled(agent: Agent, mine: Registration) -> None:
    """A cancel while Presence deregisters is passed on to the caller, and no task is left."""
    registry = agent.client(call_timeout_s=30.0)
    one = Presence(registry, mine, settings=PresenceSettings(close_timeout_s=30.0))
    await one.start()
    agent.proxy.hang()
    closing = asyncio.create_task(one.aclose())
    await asyncio.sleep(0.2)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("presence")]
    await agent.proxy.resume()


async def test_heartbeats_thrice_per_ttl(agent: Agent, mine: Registration, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends a heartbeat at the start and then at every third of the TTL, so that two may be lost."""
    clock, registry = ManualClock(), agent.client()
    heartbeats, send = [], registry.heartbeat

    async def counted(instance_id: str, *, health: Health, note: str) -> None:
        await send(instance_id, health=health, note=note)
        heartbeats.append(health)

    monkeypatch.setattr(registry, "heartbeat", counted)
    settings = PresenceSettings(attempt_timeout_s=PATIENCE_S)
    one = Presence(registry, replace(mine, ttl_s=60.0), settings=settings, clock=clock)
    await one.start()
    await settle()
    for sent in range(1, 4):
        await clock.advance(15.0)
        await asyncio.sleep(0.1)
        assert len(heartbeats) == sent
        await clock.advance(6.0)
        async with asyncio.timeout(PATIENCE_S):
            while len(heartbeats) == sent:
                await asyncio.sleep(0.02)
        await settle()
        assert len(heartbeats) == sent + 1
    await one.aclose()


async def test_peers_keep_a_member_that_the_registry_lost(
    agent: Agent, mine: Registration, stack: AsyncExitStack
) -> None:
    """The registry loses its state and the member registers again. No peer sees it missing or critical meanwhile."""
    registry = agent.client()
    await presence(stack, registry, replace(mine, ttl_s=LONG_TTL_S)).start()
    await until(registry, mine.service, takes_requests)
    views: list[View] = []
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(collect(registry, mine.service, views))
        await wait_until(lambda: any(has_ready(view) for view in views))
        await agent.proxy.refuse()
        await wait_until(lambda: views[-1].is_stale)
        await agent.lose_state()
        await until(registry, mine.service, takes_requests)
        await wait_until(lambda: not views[-1].is_stale)
        watching.cancel()
    assert all(has_ready(view) for view in views[first_ready(views) :]), views


async def test_peers_keep_members_after_an_outage_that_no_query_noticed(
    agent: Agent, mine: Registration, stack: AsyncExitStack
) -> None:
    """The network hangs for longer than the TTL and shorter than a blocking query. The registry then reports the member as critical, and
    peers ignore that, because other calls showed them that the registry was unreachable."""
    registry = agent.client(watch_wait_s=60.0)
    await presence(stack, registry, replace(mine, ttl_s=LONG_TTL_S)).start()
    await until(registry, mine.service, takes_requests)
    views: list[View] = []
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(collect(registry, mine.service, views))
        await wait_until(lambda: any(has_ready(view) for view in views))
        agent.proxy.hang()
        direct = ConsulRegistry(DiscoverySettings(address=f"127.0.0.1:{agent.port}", token=agent.token))
        stack.push_async_callback(direct.aclose)
        await until(direct, mine.service, lambda instance: instance.health is Health.CRITICAL)
        agent.proxy.flow()
        await wait_until(lambda: any(view.is_stale for view in views))
        await until(registry, mine.service, takes_requests)
        watching.cancel()
    assert all(has_ready(view) for view in views[first_ready(views) :]), views


async def collect(registry: Registry, service: str, views: list[View]) -> None:
    async with aclosing(watch_members(registry, service, SystemClock())) as watch:
        async for view in watch:
            views.append(view)


def has_ready(view: View) -> bool:
    return [instance.takes_requests for instance in view.instances] == [True]


def first_ready(views: list[View]) -> int:
    return next(number for number, view in enumerate(views) if has_ready(view))
