"""What every registry guarantees. One suite, run against the embedded agent, real Consul, and the in-memory registry."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvmesh.discovery.base import Health, Instance, Registration, Registry, View
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.errors import (
    InvalidRequestError,
    MeshError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from tests.conformance.conftest import Agent
from tests.conformance.health_server import HealthServer
from tests.patience import PATIENCE_S

LONG_S = 10 * PATIENCE_S
"""TTL that does not expire while a test runs."""


def registration(port: int = 1, **changes: object) -> Registration:
    """An instance of a service that no other test uses."""
    service = f"svc-{uuid.uuid4().hex[:12]}"
    base = Registration(
        service=service, instance_id=f"{service}-1", host="127.0.0.1", port=port, check_interval_s=0.2, ttl_s=LONG_S
    )
    return replace(base, **changes)  # type: ignore[arg-type]


async def until(registry: Registry, service: str, is_true: Callable[[Instance], bool]) -> Instance:
    """Returns the service's one instance once it satisfies the condition."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        view = await registry.instances(service)
        if len(view.instances) == 1 and is_true(view.instances[0]):
            return view.instances[0]
        assert time.monotonic() < deadline, f"still {view}"
        await asyncio.sleep(0.05)


async def beat_until_passing(registry: Registry, mine: Registration) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        await registry.heartbeat(mine.instance_id)
        if all(seen.health is Health.PASSING for seen in (await registry.instances(mine.service)).instances):
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def until_gone(registry: Registry, service: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (await registry.instances(service)).instances:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def view_where(views: AsyncGenerator[View, None], is_true: Callable[[View], bool]) -> View:
    """Returns the next view that satisfies the condition."""
    async with asyncio.timeout(PATIENCE_S):
        async for view in views:
            if is_true(view):
                return view
    raise AssertionError("the watch ended")


# Services


async def test_registration_keeps_all_fields(registry: ConsulRegistry, server: HealthServer) -> None:
    """Readers get all fields of an instance. It passes once it heartbeats and serves."""
    mine = registration(server.port, meta={"role": "decode", "kv-hash": "ä" * 256}, tags=("a", "b"))
    await registry.register(mine)
    await registry.heartbeat(mine.instance_id, note="ready")
    seen = await until(registry, mine.service, lambda instance: instance.health is Health.PASSING)
    assert (seen.service, seen.instance_id, seen.address) == (
        mine.service,
        mine.instance_id,
        f"127.0.0.1:{server.port}",
    )
    assert dict(seen.meta) == dict(mine.meta)
    assert sorted(seen.tags) == ["a", "b"]
    assert seen.takes_requests
    assert seen.notes == "ready"


async def test_no_heartbeat_yet_is_critical(registry: ConsulRegistry, server: HealthServer) -> None:
    """A server that answers its checks is not ready before its first heartbeat."""
    mine = registration(server.port)
    await registry.register(mine)
    await asyncio.sleep(0.6)
    seen = await until(registry, mine.service, lambda instance: True)
    assert seen.health is Health.CRITICAL


async def test_missed_heartbeats_turn_critical(registry: ConsulRegistry, server: HealthServer) -> None:
    """A process that hangs is critical after its TTL, and passes again with its next heartbeat."""
    # Consul takes no interval below 1 s and begins at a random time within it, so the TTL is longer than that.
    mine = registration(server.port, ttl_s=1.5)
    await registry.register(mine)
    await beat_until_passing(registry, mine)
    await until(registry, mine.service, lambda instance: instance.health is Health.CRITICAL)
    await beat_until_passing(registry, mine)


async def test_heartbeat_carries_health(registry: ConsulRegistry, server: HealthServer) -> None:
    """The worst check counts: a degraded instance is warning although its server serves."""
    mine = registration(server.port)
    await registry.register(mine)
    await registry.heartbeat(mine.instance_id, health=Health.WARNING, note="slow disk")
    seen = await until(registry, mine.service, lambda instance: instance.health is Health.WARNING)
    assert not seen.takes_requests
    assert seen.notes == "slow disk"


async def test_dead_server_turns_critical_and_recovers(registry: ConsulRegistry, server: HealthServer) -> None:
    """The next check notices a refused connection, in spite of heartbeats, and its recovery."""
    mine = registration(server.port)
    await registry.register(mine)
    await registry.heartbeat(mine.instance_id)
    await until(registry, mine.service, lambda instance: instance.health is Health.PASSING)
    await server.stop()
    await until(registry, mine.service, lambda instance: instance.health is Health.CRITICAL)
    await server.start()
    await until(registry, mine.service, lambda instance: instance.health is Health.PASSING)


async def test_server_that_reports_not_serving_is_critical(registry: ConsulRegistry, server: HealthServer) -> None:
    """The check calls grpc.health.v1; an open port is not enough."""
    mine = registration(server.port)
    await server.set_serving(False)
    await registry.register(mine)
    await registry.heartbeat(mine.instance_id)
    await asyncio.sleep(0.6)
    await until(registry, mine.service, lambda instance: instance.health is Health.CRITICAL)
    await server.set_serving(True)
    await until(registry, mine.service, lambda instance: instance.health is Health.PASSING)


async def test_drain_mark(registry: ConsulRegistry, server: HealthServer) -> None:
    """A drain mark stops requests, has a reason, keeps the health, and can be removed. Setting it twice has no effect."""
    mine = registration(server.port)
    await registry.register(mine)
    await registry.heartbeat(mine.instance_id)
    await until(registry, mine.service, lambda instance: instance.takes_requests)
    await registry.set_draining(mine.instance_id, True, reason="rolling restart & more")
    await registry.set_draining(mine.instance_id, True, reason="rolling restart & more")
    seen = await until(registry, mine.service, lambda instance: instance.is_draining)
    assert seen.health is Health.PASSING
    assert not seen.takes_requests
    assert seen.notes == "rolling restart & more"
    await registry.set_draining(mine.instance_id, False)
    await registry.set_draining(mine.instance_id, False)
    await until(registry, mine.service, lambda instance: instance.takes_requests)


async def test_drain_mark_outlives_a_second_registration(registry: ConsulRegistry, server: HealthServer) -> None:
    """New meta for a draining instance keeps the mark and the states of its checks."""
    mine = registration(server.port)
    await registry.register(mine)
    await registry.heartbeat(mine.instance_id)
    await registry.set_draining(mine.instance_id, True)
    await until(registry, mine.service, lambda instance: instance.is_draining and instance.health is Health.PASSING)
    await registry.register(replace(mine, meta={"new": "1"}))
    seen = await until(registry, mine.service, lambda instance: instance.meta == {"new": "1"})
    assert seen.is_draining
    assert seen.health is Health.PASSING


async def test_deregister(registry: ConsulRegistry) -> None:
    """A deregistered instance is gone. Deregistering twice is no error."""
    mine = registration()
    await registry.register(mine)
    await until(registry, mine.service, lambda instance: True)
    await registry.deregister(mine.instance_id)
    await until_gone(registry, mine.service)
    await registry.deregister(mine.instance_id)


async def test_calls_for_an_unknown_instance_raise(registry: ConsulRegistry, server: HealthServer) -> None:
    """A heartbeat or drain mark for an unknown instance raises NotFoundError. After a registration both work."""
    mine = registration(server.port)
    with pytest.raises(NotFoundError):
        await registry.heartbeat(mine.instance_id)
    with pytest.raises(NotFoundError):
        await registry.set_draining(mine.instance_id, True)
    await registry.register(mine)
    await registry.heartbeat(mine.instance_id)
    await until(registry, mine.service, lambda instance: instance.health is Health.PASSING)


async def test_instances_are_distinguished(registry: ConsulRegistry) -> None:
    """A view has all instances of its service by id, and none of another service."""
    mine, other = registration(), registration()
    await registry.register(replace(mine, instance_id="z-2" + mine.instance_id))
    await registry.register(replace(mine, instance_id="a-1" + mine.instance_id))
    await registry.register(other)
    view = await registry.instances(mine.service)
    assert [instance.instance_id[:3] for instance in view.instances] == ["a-1", "z-2"]
    assert (await registry.instances("svc-nobody")).instances == ()


BAD_REGISTRATIONS = {
    "service": {"service": "with space"},
    "instance_id": {"instance_id": "a/b"},
    "host": {"host": ""},
    "port": {"port": 0},
    "meta": {"meta": {f"k{number}": "" for number in range(65)}},
    "meta.long": {"meta": {"long": "v" * 513}},
    "meta.a.b": {"meta": {"a.b": "v"}},
    "tags": {"tags": ("",)},
    "ttl_s": {"ttl_s": float("nan")},
    "check_interval_s": {"check_interval_s": 0.0},
    "deregister_after_s": {"deregister_after_s": 10.0},
}


@pytest.mark.parametrize("field", BAD_REGISTRATIONS)
async def test_registration_beyond_the_limits(registry: ConsulRegistry, field: str) -> None:
    """Values that the registry would reject or mishandle are rejected with the field's name."""
    with pytest.raises(InvalidRequestError) as refusal:
        await registry.register(registration(**BAD_REGISTRATIONS[field]))
    assert refusal.value.field == field


async def test_registration_at_the_limits(registry: ConsulRegistry) -> None:
    """Values at the registry's own limits are accepted."""
    meta = {f"{number:02}" + "k" * 126: "é" * 256 for number in range(64)}
    mine = registration(meta=meta, instance_id="i" * 128, tags=["t" * 255] * 64)
    await registry.register(mine)
    seen = await until(registry, mine.service, lambda instance: True)
    assert dict(seen.meta) == meta
    await registry.deregister(mine.instance_id)


# Watches


async def test_watch_sees_every_kind_of_change(registry: ConsulRegistry, server: HealthServer) -> None:
    """The watch yields the first view immediately, empty or not, and then every change: registration, health, drain mark and departure."""
    mine = registration(server.port)
    async with aclosing(registry.watch(mine.service)) as views:
        first = await view_where(views, lambda view: True)
        assert (first.instances, first.is_stale) == ((), False)
        assert first.index > 0
        await registry.register(mine)
        await view_where(views, lambda view: len(view.instances) == 1)
        await registry.heartbeat(mine.instance_id)
        await view_where(views, lambda view: view.instances[0].takes_requests)
        await registry.set_draining(mine.instance_id, True)
        await view_where(views, lambda view: view.instances[0].is_draining)
        await registry.deregister(mine.instance_id)
        await view_where(views, lambda view: view.instances == ())


async def test_watch_is_prompt(agent: Agent) -> None:
    """A change wakes the watch, long before its blocking query would time out."""
    registry = agent.client(watch_wait_s=600.0)
    mine = registration()
    async with aclosing(registry.watch(mine.service)) as views:
        await anext(views)
        await asyncio.sleep(0.2)
        await registry.register(mine)
        await view_where(views, lambda view: len(view.instances) == 1)


async def test_watch_yields_nothing_without_a_change(registry: ConsulRegistry, server: HealthServer) -> None:
    """Timeouts of queries, heartbeats and equal registrations are not reported as changes."""
    mine = registration(server.port)
    await registry.register(mine)
    await registry.heartbeat(mine.instance_id)
    await until(registry, mine.service, lambda instance: instance.takes_requests)
    async with aclosing(registry.watch(mine.service)) as views:
        await view_where(views, lambda view: view.instances[0].takes_requests)
        following = asyncio.ensure_future(anext(views))
        await registry.register(mine)
        await registry.heartbeat(mine.instance_id)
        # One whole wait of the blocking query.
        await asyncio.wait((following,), timeout=2.5)
        assert not following.done()
        await registry.deregister(mine.instance_id)
        async with asyncio.timeout(PATIENCE_S):
            assert (await following).instances == ()


@pytest.mark.parametrize("how", ["refuse", "hang"])
async def test_watch_outlives_an_outage(agent: Agent, how: str) -> None:
    """During an outage the last view stays, marked stale once. After the outage the next view is fresh."""
    writer, registry = agent.client(), agent.client(watch_wait_s=1.0, call_timeout_s=0.5)
    mine = registration()
    await writer.register(mine)
    async with aclosing(registry.watch(mine.service)) as views:
        await view_where(views, lambda view: len(view.instances) == 1)
        await _break(agent, how)
        # A query that a busy machine answers too late is reported as an outage too, before this one.
        stale = await view_where(views, lambda view: view.is_stale)
        assert [instance.instance_id for instance in stale.instances] == [mine.instance_id]
        following = asyncio.ensure_future(anext(views))
        await asyncio.wait((following,), timeout=1.5)
        assert not following.done(), "the outage was reported twice"
        await agent.proxy.resume()
        async with asyncio.timeout(PATIENCE_S):
            fresh = await following
        assert not fresh.is_stale
        assert fresh.instances == stale.instances
        await writer.deregister(mine.instance_id)
        await view_where(views, lambda view: view.instances == ())


async def test_watch_begun_in_an_outage(agent: Agent) -> None:
    """A watch that starts while the registry is unreachable yields an empty stale view, and later the real one."""
    registry = agent.client()
    await agent.proxy.refuse()
    mine = registration()
    async with aclosing(registry.watch(mine.service)) as views:
        first = await anext(views)
        assert (first.is_stale, first.instances, first.index) == (True, (), 0)
        await agent.proxy.resume()
        await view_where(views, lambda view: not view.is_stale)
        await registry.register(mine)
        await view_where(views, lambda view: len(view.instances) == 1)


async def test_watch_follows_a_registry_that_lost_its_state(agent: Agent) -> None:
    """After a restart without memory the watch shows the new state, and later changes."""
    registry = agent.client()
    mine = registration()
    await registry.register(mine)
    async with aclosing(registry.watch(mine.service)) as views:
        await view_where(views, lambda view: len(view.instances) == 1)
        await agent.lose_state()
        await view_where(views, lambda view: not view.is_stale and view.instances == ())
        with pytest.raises(NotFoundError):
            await registry.heartbeat(mine.instance_id)
        await registry.register(mine)
        await view_where(views, lambda view: len(view.instances) == 1)


async def test_many_watches_leave_room_for_calls(agent: Agent) -> None:
    """Watches use their own connections: short calls do not wait for them."""
    registry = agent.client(calls_max=2)
    watches = [registry.watch(f"svc-watch-{number}") for number in range(40)]
    for views in watches:
        await anext(views)
    following = [asyncio.ensure_future(anext(views)) for views in watches]
    await asyncio.sleep(0.2)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(registry.get("no/such/key") for _ in range(10)))
    assert registry.watches_open == 40
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)
    assert registry.watches_open == 0


async def test_cancelled_watch_frees_everything(registry: ConsulRegistry) -> None:
    """A watch cancelled while it waits for the registry leaves no connection and no task."""
    views = registry.watch("svc-cancelled")
    await anext(views)
    before = asyncio.all_tasks()
    following = asyncio.ensure_future(anext(views))
    await asyncio.sleep(0.2)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert registry.watches_open == 0
    # The server notices the end of the connection a moment later.
    async with asyncio.timeout(PATIENCE_S):
        while {task for task in asyncio.all_tasks() - before if "Proxy" not in repr(task)}:
            await asyncio.sleep(0.02)


async def test_closing_the_registry_ends_its_watches(agent: Agent) -> None:
    """A watch ends without an error when its registry closes, during a query and during backoff."""
    waiting, failing = agent.client(), agent.client()
    views = waiting.watch("svc-closing")
    await anext(views)
    last = asyncio.ensure_future(anext(views))
    await asyncio.sleep(0.2)
    await waiting.aclose()
    await waiting.aclose()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(last, PATIENCE_S)
    await agent.proxy.refuse()
    views = failing.watch("svc-closing")
    await anext(views)
    last = asyncio.ensure_future(anext(views))
    await asyncio.sleep(0.5)
    await failing.aclose()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(last, PATIENCE_S)
    with pytest.raises(UnavailableError):
        await failing.get("key")


# Keys


def key(*segments: str) -> str:
    """Returns a key that no other test uses."""
    return "/".join((f"test-{uuid.uuid4().hex[:12]}", *segments))


@pytest.mark.parametrize("value", [b"", b"text", bytes(range(256)), b"x" * (512 * 1024)], ids=len)
async def test_values_are_returned_unchanged(registry: ConsulRegistry, value: bytes) -> None:
    """Any bytes up to the limit are returned unchanged."""
    name = key("a b", "%2F+?#&=ä")
    assert await registry.get(name) is None
    assert await registry.put(name, value)
    entry = await registry.get(name)
    assert entry is not None
    assert (entry.key, entry.value, entry.session) == (name, value, "")
    assert entry.modify_index > 0
    await registry.delete(name)
    await registry.delete(name)
    assert await registry.get(name) is None


async def test_compare_and_set(registry: ConsulRegistry) -> None:
    """A conditional write succeeds only on the state that its writer read; index 0 means absent."""
    name = key("counter")
    assert await registry.put(name, b"1", expected_index=0)
    assert not await registry.put(name, b"2", expected_index=0)
    first = await registry.get(name)
    assert first is not None
    assert await registry.put(name, b"2", expected_index=first.modify_index)
    assert not await registry.put(name, b"3", expected_index=first.modify_index)
    second = await registry.get(name)
    assert second is not None
    assert second.value == b"2"
    assert second.modify_index > first.modify_index
    await registry.delete(name)
    assert not await registry.put(name, b"4", expected_index=second.modify_index)


async def test_compare_and_set_under_contention(registry: ConsulRegistry) -> None:
    """Increments by many writers are all counted."""
    name = key("counter")

    async def increment() -> None:
        while True:
            entry = await registry.get(name)
            count, index = (int(entry.value), entry.modify_index) if entry else (0, 0)
            if await registry.put(name, str(count + 1).encode(), expected_index=index):
                return

    await asyncio.gather(*(increment() for _ in range(12)))
    entry = await registry.get(name)
    assert entry is not None
    assert entry.value == b"12"


@pytest.mark.parametrize("name", ["", "/lead", "a//b", "a/../b", "a/.", "a/", "k" * 513])
async def test_bad_keys(registry: ConsulRegistry, name: str) -> None:
    """Keys that the registry's HTTP server would change are rejected with the field's name."""
    for call in (registry.get(name), registry.put(name, b""), registry.delete(name)):
        with pytest.raises(InvalidRequestError) as refusal:
            await call
        assert refusal.value.field == "key"


async def test_value_too_large(registry: ConsulRegistry) -> None:
    """A value above Consul's limit is rejected with the field's name."""
    with pytest.raises(InvalidRequestError) as refusal:
        await registry.put(key("big"), b"x" * (512 * 1024 + 1))
    assert refusal.value.field == "value"


# Sessions and locks


async def test_lock_has_one_holder(registry: ConsulRegistry) -> None:
    """One of two sessions holds the lock until it releases it. The value survives the release."""
    name = key("leader")
    one = await registry.create_session(name="one", ttl_s=LONG_S)
    two = await registry.create_session(name="two", ttl_s=LONG_S)
    assert await registry.acquire(name, one, b"one")
    assert not await registry.acquire(name, two, b"two")
    assert await registry.acquire(name, one, b"one again")
    entry = await registry.get(name)
    assert entry is not None
    assert (entry.session, entry.value) == (one, b"one again")
    assert not await registry.release(name, two)
    assert await registry.release(name, one)
    assert not await registry.release(name, one)
    entry = await registry.get(name)
    assert entry is not None
    assert (entry.session, entry.value) == ("", b"one again")
    assert await registry.acquire(name, two, b"two")
    await registry.destroy_session(one)
    await registry.destroy_session(two)


async def test_lock_contention(registry: ConsulRegistry) -> None:
    """If many sessions try to lock concurrently, exactly one succeeds."""
    name = key("leader")
    sessions = [await registry.create_session(name="x", ttl_s=LONG_S) for _ in range(6)]
    taken = await asyncio.gather(*(registry.acquire(name, session, session.encode()) for session in sessions))
    assert sum(taken) == 1
    entry = await registry.get(name)
    assert entry is not None
    assert entry.value.decode() == entry.session == sessions[taken.index(True)]
    for session in sessions:
        await registry.destroy_session(session)


async def test_destroyed_session_frees_its_locks(registry: ConsulRegistry) -> None:
    """A destroyed session releases its locks and is unknown. Destroying it twice is no error."""
    name = key("leader")
    one = await registry.create_session(name="one", ttl_s=LONG_S)
    assert await registry.acquire(name, one)
    await registry.renew_session(one)
    await registry.destroy_session(one)
    await registry.destroy_session(one)
    entry = await registry.get(name)
    assert entry is not None
    assert entry.session == ""
    with pytest.raises(NotFoundError):
        await registry.renew_session(one)
    with pytest.raises(NotFoundError):
        await registry.acquire(name, one)
    assert not await registry.release(name, one)


@pytest.mark.parametrize("session_id", ["no-uuid", str(uuid.UUID(int=0))])
async def test_unknown_session(registry: ConsulRegistry, session_id: str) -> None:
    """An unknown session id raises, whatever its form."""
    with pytest.raises(NotFoundError):
        await registry.renew_session(session_id)
    with pytest.raises(NotFoundError):
        await registry.acquire(key("leader"), session_id)
    await registry.destroy_session(session_id)


async def test_lock_delay(registry: ConsulRegistry) -> None:
    """The lock of a lost session is blocked for the delay, then free."""
    name = key("leader")
    one = await registry.create_session(name="one", ttl_s=LONG_S, lock_delay_s=1.0)
    two = await registry.create_session(name="two", ttl_s=LONG_S)
    assert await registry.acquire(name, one)
    began = time.monotonic()
    await registry.destroy_session(one)
    while not await registry.acquire(name, two):
        assert time.monotonic() - began < PATIENCE_S
        await asyncio.sleep(0.1)
    assert time.monotonic() - began > 0.8
    await registry.destroy_session(two)


@pytest.mark.parametrize("ttl_s", [9.0, 86_401.0, float("nan")])
async def test_session_ttl_beyond_the_limits(registry: ConsulRegistry, ttl_s: float) -> None:
    """A TTL that Consul would reject is rejected with the field's name."""
    with pytest.raises(InvalidRequestError) as refusal:
        await registry.create_session(name="x", ttl_s=ttl_s)
    assert refusal.value.field == "ttl_s"


@pytest.mark.slow
@pytest.mark.parametrize("registry", ["consul"], indirect=True)
async def test_session_expires_in_real_time(registry: ConsulRegistry) -> None:
    """A session without renewal ends after its TTL, and its lock is free.

    For the embedded agent, tests/unit/test_discovery_embedded.py tests this with a clock that the test moves.
    """
    name = key("leader")
    one = await registry.create_session(name="one", ttl_s=10.0)
    assert await registry.acquire(name, one)
    began = time.monotonic()
    async with asyncio.timeout(2 * PATIENCE_S):
        while (entry := await registry.get(name)) is not None and entry.session:
            await asyncio.sleep(0.25)
    assert time.monotonic() - began > 9.5


# Tokens and outages


async def test_token_is_passed(guarded_agent: Agent, server: HealthServer) -> None:
    """With the token all calls work, and unknown objects raise the same errors as without access control."""
    registry = guarded_agent.client()
    mine = registration(server.port)
    with pytest.raises(NotFoundError):
        await registry.heartbeat(mine.instance_id)
    with pytest.raises(NotFoundError):
        await registry.set_draining(mine.instance_id, True)
    await registry.deregister(mine.instance_id)
    await registry.register(mine)
    await registry.heartbeat(mine.instance_id)
    await until(registry, mine.service, lambda instance: instance.takes_requests)
    assert await registry.put(key("a"), b"1")
    session = await registry.create_session(name="x", ttl_s=LONG_S)
    await registry.renew_session(session)
    await registry.destroy_session(session)
    await registry.deregister(mine.instance_id)


async def test_without_the_token_nothing_changes(guarded_agent: Agent) -> None:
    """Calls without a token raise PermissionDeniedError, calls with an unknown token UnauthenticatedError. A watch raises immediately."""
    anonymous, unknown = guarded_agent.client(token=""), guarded_agent.client(token=str(uuid.uuid4()))
    with pytest.raises(PermissionDeniedError):
        await anonymous.put(key("a"), b"1")
    with pytest.raises(PermissionDeniedError):
        await anonymous.register(registration())
    with pytest.raises(UnauthenticatedError):
        await unknown.put(key("a"), b"1")
    with pytest.raises(UnauthenticatedError):
        await anext(unknown.watch("svc-guarded"))


def every_call(registry: ConsulRegistry) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "register": lambda: registry.register(registration()),
        "deregister": lambda: registry.deregister("x"),
        "heartbeat": lambda: registry.heartbeat("x"),
        "set_draining": lambda: registry.set_draining("x", True),
        "instances": lambda: registry.instances("x"),
        "get": lambda: registry.get("x"),
        "put": lambda: registry.put("x", b""),
        "delete": lambda: registry.delete("x"),
        "create_session": lambda: registry.create_session(name="x", ttl_s=LONG_S),
        "renew_session": lambda: registry.renew_session("x"),
        "destroy_session": lambda: registry.destroy_session("x"),
        "acquire": lambda: registry.acquire("x", "x"),
        "release": lambda: registry.release("x", "x"),
    }


@pytest.mark.parametrize("how", ["refuse", "hang"])
async def test_every_call_ends_when_the_registry_is_unreachable(agent: Agent, how: str) -> None:
    """Whether the registry refuses connections or hangs, every call fails within its timeout with UnavailableError."""
    warm, registry = agent.client(), agent.client(call_timeout_s=0.4)
    await warm.get("warm/connection")
    await _break(agent, how)

    async def failure_of(call: Callable[[], Awaitable[object]]) -> MeshError:
        with pytest.raises(MeshError) as failure:
            await call()
        return failure.value

    # Only its own timeout ends a call to a registry that does not respond.
    async with asyncio.timeout(PATIENCE_S):
        failures = await asyncio.gather(*(failure_of(call) for call in every_call(registry).values()))
    assert {type(failure) for failure in failures} == {UnavailableError}
    await agent.proxy.resume()
    # Delayed calls may have succeeded after all, so their key "x" shows nothing. Another key shows that calls work again.
    assert await warm.get("never/written") is None


async def test_calls_cancelled_anywhere_leave_room(agent: Agent) -> None:
    """Wherever a call is cancelled, its slot is free afterwards and no task is left."""
    registry = agent.client(calls_max=1)
    name = key("cancelled")
    for steps in range(0, 60, 2):
        task = asyncio.create_task(registry.put(name, b"value"))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(PATIENCE_S):
            await registry.get(name)
    assert not [task for task in asyncio.all_tasks() if "ConsulRegistry" in repr(task)]


async def test_watches_cancelled_anywhere_leave_room(agent: Agent) -> None:
    """Wherever a watch is cancelled, it is closed afterwards and the next one can be opened."""
    registry = agent.client(watches_max=1, watch_interval_min_s=0.01)
    for steps in range(0, 120, 4):
        views = registry.watch("svc-cancelled")

        async def look(views: AsyncGenerator[View, None] = views) -> None:
            async with aclosing(views):
                async for _ in views:
                    pass

        task = asyncio.create_task(look())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert registry.watches_open == 0
    async with asyncio.timeout(PATIENCE_S):
        assert not (await anext(registry.watch("svc-cancelled"))).is_stale


async def test_number_of_watches_is_bounded(agent: Agent) -> None:
    """A watch beyond the limit is rejected."""
    registry = agent.client(watches_max=1)
    async with aclosing(registry.watch("svc-one")) as views:
        await anext(views)
        with pytest.raises(OverloadedError):
            await anext(registry.watch("svc-two"))


async def _break(agent: Agent, how: str) -> None:
    if how == "refuse":
        await agent.proxy.refuse()
    else:
        agent.proxy.hang()
