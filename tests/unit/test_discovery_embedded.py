"""The HTTP interface of the embedded agent, with valid, invalid and excessive requests."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.discovery.base import Health, Registration
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings, DiscoverySettings
from kvmesh.errors import NotFoundError
from tests.conformance.manual_clock import ManualClock
from tests.patience import PATIENCE_S
from tests.worker_rig import wait_until

Start = Callable[..., Any]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as one:
        yield one


async def start(stack: AsyncExitStack, clock: ManualClock | None = None, **settings: Any) -> EmbeddedAgent:
    agent = EmbeddedAgent(AgentSettings(**settings), clock)
    await agent.start()
    stack.push_async_callback(agent.aclose)
    return agent


async def http(stack: AsyncExitStack, agent: EmbeddedAgent) -> aiohttp.ClientSession:
    return await stack.enter_async_context(aiohttp.ClientSession(agent.address))


async def client(stack: AsyncExitStack, agent: EmbeddedAgent) -> ConsulRegistry:
    registry = ConsulRegistry(
        DiscoverySettings(address=agent.address, call_timeout_s=PATIENCE_S, watch_interval_min_s=0.0)
    )
    stack.push_async_callback(registry.aclose)
    return registry


async def wait_queries(agent: EmbeddedAgent, count: int) -> None:
    """Waits until `count` blocking queries wait in the agent."""
    await wait_until(lambda: agent.queries.waiting == count, f"{count} queries wait")


MINE = Registration(service="svc", instance_id="one", host="127.0.0.1", port=1, ttl_s=6.0, check_interval_s=600.0)


async def test_time_passes_on_the_agents_clock(stack: AsyncExitStack) -> None:
    """A missed heartbeat and the removal of a critical instance happen at their times, and a watch sees both."""
    clock = ManualClock()
    agent = await start(stack, clock)
    registry = await client(stack, agent)
    views = registry.watch("svc")
    assert (await anext(views)).instances == ()
    # Without the check of its gRPC health, which has a limit of its own in real time.
    await registry.register(replace(MINE, is_checked=False))
    await registry.heartbeat("one")
    while (view := await anext(views)).instances[0].health is not Health.PASSING:
        pass
    await clock.advance(5.9)
    assert (await registry.instances("svc")).instances[0].health is Health.PASSING
    await clock.advance(0.2)
    view = await anext(views)
    assert view.instances[0].health is Health.CRITICAL
    await clock.advance(120.0)
    assert (await anext(views)).instances == ()
    with pytest.raises(NotFoundError):
        await registry.heartbeat("one")
    await views.aclose()


async def test_session_expires_on_the_agents_clock(stack: AsyncExitStack) -> None:
    """A lock becomes free when its session was not renewed for the TTL, and not earlier."""
    clock = ManualClock()
    registry = await client(stack, await start(stack, clock))
    one, two = [await registry.create_session(name="x", ttl_s=10.0) for _ in range(2)]
    assert await registry.acquire("leader", one)
    await clock.advance(9.0)
    await registry.renew_session(one)
    await registry.renew_session(two)
    await clock.advance(9.5)
    await registry.renew_session(two)
    assert not await registry.acquire("leader", two)
    await clock.advance(0.5)
    with pytest.raises(NotFoundError):
        await registry.renew_session(one)
    assert await registry.acquire("leader", two)


async def test_a_blocking_query_waits_for_a_newer_index(stack: AsyncExitStack) -> None:
    """With the index of the last answer, the query answers after a change or after its wait. With another index it answers immediately."""
    agent = await start(stack)
    web, registry = await http(stack, agent), await client(stack, agent)
    async with web.get("/v1/health/service/svc") as answer:
        index = int(answer.headers["X-Consul-Index"])
        assert await answer.json() == []
    began = time.monotonic()
    async with web.get(f"/v1/health/service/svc?index={index}&wait=200ms") as answer:
        assert int(answer.headers["X-Consul-Index"]) == index
    assert time.monotonic() - began > 0.19
    async with web.get(f"/v1/health/service/svc?index={index + 1000}&wait=600s") as answer:
        assert answer.status == 200
    waiting = asyncio.ensure_future(web.get(f"/v1/health/service/svc?index={index}&wait=600s"))
    names = asyncio.ensure_future(web.get(f"/v1/catalog/services?index={index}&wait=600s"))
    await wait_queries(agent, 2)
    await registry.register(MINE)
    assert [entry["Service"]["ID"] for entry in await (await waiting).json()] == ["one"]
    assert await (await names).json() == {"svc": []}
    assert agent.queries.waiting == 0


async def test_a_disconnected_client_ends_its_query(stack: AsyncExitStack) -> None:
    """A blocking query ends when its client disconnects, instead of minutes later."""
    agent = await start(stack)
    async with aiohttp.ClientSession(agent.address) as web:
        async with web.get("/v1/health/service/svc") as answer:
            index = answer.headers["X-Consul-Index"]
        waiting = asyncio.ensure_future(web.get(f"/v1/health/service/svc?index={index}"))
        await wait_queries(agent, 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await wait_queries(agent, 0)


async def test_closing_ends_blocking_queries_and_tasks(stack: AsyncExitStack) -> None:
    """The agent closes promptly while watches are open, and none of its tasks remains."""
    before = asyncio.all_tasks()
    agent = EmbeddedAgent(AgentSettings(close_timeout_s=600.0))
    await agent.start()
    registry = await client(stack, agent)
    await registry.register(MINE)
    views = registry.watch("svc")
    await anext(views)
    following = asyncio.ensure_future(anext(views))
    await wait_queries(agent, 1)
    async with asyncio.timeout(PATIENCE_S):
        await agent.aclose()
        await agent.aclose()
        assert (await following).is_stale
    await views.aclose()
    await registry.aclose()
    await wait_until(lambda: asyncio.all_tasks() <= before, "the agent's tasks end")


BAD_BODIES = [
    (b"", "body"),
    (b"{", "body"),
    (b"[" * 100_000, "body"),
    (b"[]", "body"),
    (b'{"Name": ""}', "service"),
    (b'{"Name": "a b"}', "service"),
    (b'{"Name": 3}', "Name"),
    (b'{"Name": "a", "Bogus": 1}', "Bogus"),
    (b'{"Name": "a", "Port": "80"}', "Port"),
    (b'{"Name": "a", "Port": true}', "Port"),
    (b'{"Name": "a", "Port": 70000}', "Port"),
    (b'{"Name": "a", "Meta": {"k": 1}}', "Meta"),
    (b'{"Name": "a", "Meta": {"a.b": "v"}}', "meta.a.b"),
    (b'{"Name": "a", "Checks": [3]}', "Checks[0]"),
    (b'{"Name": "a", "Checks": [{}]}', "Checks[0]"),
    (b'{"Name": "a", "Checks": [{"TTL": "6"}]}', "Checks[0].TTL"),
    (b'{"Name": "a", "Checks": [{"TTL": "0s"}]}', "Checks[0]"),
    (b'{"Name": "a", "Checks": [{"GRPC": "h:1"}]}', "Checks[0].Interval"),
    (b'{"Name": "a", "Checks": [{"GRPC": "h:1", "TTL": "1s"}]}', "Checks[0]"),
    (b'{"Name": "a", "Checks": [{"HTTP": "http://h"}]}', "Checks[0].HTTP"),
    (b'{"Name": "a", "Checks": [{"TTL": "1s", "Status": "fine"}]}', "Checks[0].Status"),
    (b'{"Name": "a", "Checks": [{"TTL": "1s", "CheckID": "x"}, {"TTL": "1s", "CheckID": "x"}]}', "Checks"),
    (json.dumps({"Name": "a", "Checks": [{"TTL": "1s"}] * 9}).encode(), "Checks"),
]


@pytest.mark.parametrize(("body", "field"), BAD_BODIES)
async def test_bad_registrations_are_refused(stack: AsyncExitStack, body: bytes, field: str) -> None:
    """An invalid registration gets status 400 with the name of the field, and nothing is registered."""
    agent = await start(stack)
    web = await http(stack, agent)
    async with web.put("/v1/agent/service/register", data=body) as answer:
        assert (answer.status, field in await answer.text()) == (400, True)
    assert not agent.state.catalog.services


BAD_CALLS = [
    ("PUT", "/v1/agent/check/update/none", b"{}", 404),
    ("PUT", "/v1/agent/check/update/none", b'{"Status": "fine"}', 400),
    ("PUT", "/v1/agent/service/maintenance/none?enable=true", b"", 404),
    ("PUT", "/v1/agent/service/maintenance/none", b"", 400),
    ("GET", "/v1/health/service/svc?index=-1", b"", 400),
    ("GET", "/v1/health/service/svc?index=" + "9" * 40, b"", 400),
    ("GET", "/v1/health/service/svc?wait=5", b"", 400),
    ("GET", "/v1/health/service/svc?filter=x", b"", 400),
    ("GET", "/v1/kv/", b"", 400),
    ("GET", "/v1/kv/none", b"", 404),
    ("GET", "/v1/kv/none?recurse", b"", 404),
    ("PUT", "/v1/kv/k?cas=x", b"", 400),
    ("PUT", "/v1/kv/k?cas=1&acquire=x", b"", 400),
    ("PUT", "/v1/kv/k?acquire=none", b"", 404),
    ("PUT", "/v1/kv/k", b"x" * (512 * 1024 + 1), 400),
    ("PUT", "/v1/kv/k", b"x" * (600 * 1024), 413),
    ("PUT", "/v1/session/create", b'{"TTL": "5s"}', 400),
    ("PUT", "/v1/session/create", b'{"LockDelay": "61s"}', 400),
    ("PUT", "/v1/session/create", b'{"Behavior": "x"}', 400),
    ("PUT", "/v1/session/renew/none", b"", 404),
    ("POST", "/v1/agent/service/register", b"{}", 405),
    ("GET", "/v1/nothing", b"", 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), BAD_CALLS, ids=range(len(BAD_CALLS)))
async def test_bad_calls_are_refused(stack: AsyncExitStack, method: str, path: str, body: bytes, status: int) -> None:
    """Each bad call gets its own status, never 500, and the agent keeps serving."""
    agent = await start(stack)
    web = await http(stack, agent)
    async with web.request(method, path, data=body) as answer:
        assert answer.status == status
    async with web.get("/v1/status/leader") as answer:
        assert await answer.json() == f"127.0.0.1:{agent.port}"


async def test_services_keys_sessions_and_watches_are_limited(stack: AsyncExitStack) -> None:
    """A request beyond a limit gets status 429. Freed capacity can be used again."""
    agent = await start(stack, services_max=1, watchers_max=1, keys_max=1, sessions_max=1)
    web = await http(stack, agent)

    async def put(path: str, body: bytes = b"") -> int:
        async with web.put(path, data=body) as answer:
            return answer.status

    assert await put("/v1/agent/service/register", b'{"Name": "a"}') == 200
    assert await put("/v1/agent/service/register", b'{"Name": "b"}') == 429
    assert await put("/v1/agent/service/deregister/a") == 200
    assert await put("/v1/agent/service/register", b'{"Name": "b"}') == 200
    assert [await put("/v1/kv/a"), await put("/v1/kv/b"), await put("/v1/kv/a")] == [200, 429, 200]
    assert [await put("/v1/session/create"), await put("/v1/session/create")] == [200, 429]
    index = agent.state.index
    async with web.get("/v1/catalog/services") as answer:
        index = int(answer.headers["X-Consul-Index"])
    waiting = asyncio.ensure_future(web.get(f"/v1/catalog/services?index={index}"))
    await wait_queries(agent, 1)
    async with web.get(f"/v1/catalog/services?index={index}") as answer:
        assert answer.status == 429
    async with web.get("/v1/catalog/services") as answer:
        assert answer.status == 200
    waiting.cancel()


async def test_consuls_query_parameters_are_supported(stack: AsyncExitStack) -> None:
    """`pretty`, `recurse`, `passing` and `tag` work as in Consul."""
    agent = await start(stack)
    web = await http(stack, agent)
    body = {"Name": "svc", "ID": "up", "Tags": ["x"], "Checks": [{"TTL": "60s", "Status": "passing"}]}
    await web.put("/v1/agent/service/register", json=body)
    await web.put("/v1/agent/service/register", json={"Name": "svc", "ID": "down", "Check": {"TTL": "60s"}})

    async def ids(query: str) -> list[str]:
        async with web.get(f"/v1/health/service/svc{query}") as answer:
            return [entry["Service"]["ID"] for entry in await answer.json()]

    assert (await ids(""), await ids("?passing"), await ids("?passing=1&tag=y")) == (["down", "up"], ["up"], [])
    assert await ids("?tag=x") == ["up"]
    for key in ("a/b", "a/c", "b"):
        await web.put(f"/v1/kv/{key}", data=b"value")
    async with web.get("/v1/kv/a/?recurse&pretty") as answer:
        text = await answer.text()
        assert "\n    " in text
        assert [entry["Key"] for entry in json.loads(text)] == ["a/b", "a/c"]


async def test_a_port_in_use_is_an_error(stack: AsyncExitStack) -> None:
    """A second agent on the same port does not start, and can be closed."""
    agent = await start(stack)
    second = EmbeddedAgent(AgentSettings(port=agent.port))
    with pytest.raises(OSError, match="in use"):
        await second.start()
    await second.aclose()


async def test_the_index_grows_across_a_restart(stack: AsyncExitStack) -> None:
    """An agent that starts later has a higher index, so that an old compare-and-set cannot succeed by accident."""
    clock = ManualClock()
    first = await start(stack, clock)
    await clock.advance(60.0)
    assert (await start(stack, clock)).state.index > first.state.index


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_agent_runs_as_a_program(tmp_path: Path, number: signal.Signals) -> None:
    """As a program, the agent prints its address, requires the token in the file, and exits with status 0 on a signal."""
    (tmp_path / "token").write_text("s3cret\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvmesh.discovery.embedded", "--port", "0", "--token-file", str(tmp_path / "token"),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode().strip()
        async with aiohttp.ClientSession(address) as web:
            async with web.get("/v1/status/leader") as answer:
                assert answer.status == 403
            async with web.get("/v1/status/leader", headers={"Authorization": "Bearer s3cret"}) as answer:
                assert answer.status == 200
        process.send_signal(number)
        _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert process.returncode == 0
        assert b"Traceback" not in errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
