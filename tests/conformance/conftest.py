"""The registries that the conformance suite runs against."""

import contextlib
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings, DiscoverySettings
from kvmesh.simulation.registry import MemoryAgent, MemoryRegistry
from tests.conformance.health_server import HealthServer
from tests.conformance.tcp_proxy import TcpProxy
from tests.patience import PATIENCE_S
from tests.servers import consul_server

TOKEN = "11111111-2222-3333-4444-555555555555"
ACL = {"acl": {"enabled": True, "default_policy": "deny", "tokens": {"master": TOKEN}}}

# Short enough for tests, and long enough for a machine that runs other programs too.
CLIENT = DiscoverySettings(watch_wait_s=2.0, call_timeout_s=30.0, watch_interval_min_s=0.02, backoff_max_s=0.3)


@dataclass
class Agent:
    """An agent under test, behind a proxy that can break."""

    kind: str
    proxy: TcpProxy
    port: int
    start_empty: Callable[[], Awaitable[int]]
    clients: AsyncExitStack
    token: str = ""

    def client(self, **changes: Any) -> ConsulRegistry:
        """Returns a registry client that connects through the proxy. It is closed when the test ends."""
        settings = replace(CLIENT, address=self.proxy.address, **({"token": self.token} | changes))
        client = ConsulRegistry(settings)
        self.clients.push_async_callback(client.aclose)
        return client

    async def lose_state(self) -> None:
        """Acts as if the agent had restarted without its stored state."""
        await self.proxy.refuse()
        self.proxy.target_port = await self.start_empty()
        await self.proxy.resume()


@pytest.fixture(scope="session")
def consul_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., int]]:
    """Returns a function that starts real Consul agents by name, each once per test run, and returns their ports."""
    ports: dict[str, int] = {}
    with ExitStack() as stack:

        def port(name: str, *, with_acl: bool = False) -> int:
            if name not in ports:
                folder = tmp_path_factory.mktemp("consul")
                server = stack.enter_context(consul_server(folder, _config(with_acl)))
                _wait_for_node_check(server.url)
                ports[name] = int(server.address.rpartition(":")[2])
            return ports[name]

        yield port


def _wait_for_node_check(url: str) -> None:
    """Waits for the check of Consul's own node. Without it Consul creates no sessions; it appears a moment after the leader election."""
    request = urllib.request.Request(f"{url}/v1/health/state/passing", headers={"X-Consul-Token": TOKEN})
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=2) as answer:
            if any(check["CheckID"] == "serfHealth" for check in json.load(answer)):
                return
        time.sleep(0.05)
    raise TimeoutError(f"{url} has no check of its node")


def _config(with_acl: bool) -> dict[str, Any]:
    # All tests connect from one address, and some hold many watches.
    return {"limits": {"http_max_conns_per_client": 1000}, **(ACL if with_acl else {})}


@pytest.fixture(params=["embedded", "consul"])
async def agent(request: pytest.FixtureRequest) -> AsyncIterator[Agent]:
    async for one in _agents(request, request.param, with_acl=False):
        yield one


@pytest.fixture(params=["embedded", "consul"])
async def guarded_agent(request: pytest.FixtureRequest) -> AsyncIterator[Agent]:
    """An agent that requires a token."""
    async for one in _agents(request, request.param, with_acl=True):
        yield one


@pytest.fixture(params=["embedded", "consul", "memory"])
async def registry(request: pytest.FixtureRequest) -> AsyncIterator[ConsulRegistry | MemoryRegistry]:
    """A client. The registry in memory has no connection that could break, and so no `agent`."""
    if request.param == "memory":
        async with _memory_client() as client:
            yield client
        return
    async for one in _agents(request, request.param, with_acl=False):
        yield one.client()


@asynccontextmanager
async def _memory_client() -> AsyncIterator[MemoryRegistry]:
    one = MemoryAgent()
    await one.start()
    try:
        yield one.registry()
    finally:
        await one.aclose()


@pytest.fixture
async def server() -> AsyncIterator[HealthServer]:
    one = HealthServer()
    await one.start()
    yield one
    await one.stop()


async def _agents(request: pytest.FixtureRequest, kind: str, *, with_acl: bool) -> AsyncIterator[Agent]:
    token = TOKEN if with_acl else ""
    async with AsyncExitStack() as stack:

        async def embedded() -> int:
            one = EmbeddedAgent(AgentSettings(token=token))
            await one.start()
            stack.push_async_callback(one.aclose)
            return one.port

        async def consul() -> int:
            start: Callable[..., int] = request.getfixturevalue("consul_ports")
            # All tests share the first agent. An agent that lost its state belongs to one test.
            return start(f"empty {request.node.name}" if is_started else shared, with_acl=with_acl)

        shared, is_started = ("acl" if with_acl else "plain"), False
        start_empty = embedded if kind == "embedded" else consul
        port = await start_empty()
        is_started = True
        proxy = TcpProxy(port)
        await proxy.start()
        stack.push_async_callback(proxy.aclose)
        clients = await stack.enter_async_context(AsyncExitStack())
        yield Agent(kind=kind, proxy=proxy, port=port, start_empty=start_empty, clients=clients, token=token)
