"""Following a Consul agent that fails, sends invalid documents, and recovers. The agent is an HTTP server that the test controls."""

import asyncio
import datetime
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kvmesh.clock import SystemClock
from kvmesh.discovery.connect.identity import ConnectIdentity
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import UnavailableError
from kvmesh.identity.roles import MeshRole
from tests.connect_authority import NAMES, UriAuthority
from tests.patience import PATIENCE_S
from tests.worker_rig import wait_until

CHECKS = "/v1/connect/intentions/check"


class Agent:
    """Serves the documents of Consul Connect. If `status` is not 200, all requests fail."""

    def __init__(self) -> None:
        self.authority = UriAuthority()
        self.status = 200
        self.index = 1
        self.allowed = {"kvmesh-frontend"}
        self.leaf: object = None
        self.waiting: set[str] = set()
        """The paths whose queries wait for a change."""
        self.issue()
        self._changed = asyncio.Event()

    def issue(self, *, lifetime_h: float = 1.0) -> None:
        """Issues a new certificate for the decode worker."""
        made = self.authority.issue(NAMES.server_uri(MeshRole.DECODE), lifetime=datetime.timedelta(hours=lifetime_h))
        self.leaf = {"CertPEM": made.certificate.decode(), "PrivateKeyPEM": made.key.decode()}

    def change(self) -> None:
        """Ends the blocking queries."""
        self.index += 1
        earlier, self._changed = self._changed, asyncio.Event()
        earlier.set()

    async def answer(self, request: web.Request) -> web.Response:
        if self.status == 200 and request.query.get("index") == str(self.index):
            self.waiting.add(request.path)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            finally:
                self.waiting.discard(request.path)
        if self.status != 200:
            return web.Response(status=self.status, text="no leader")
        return web.Response(text=json.dumps(self._document(request)), headers={"X-Consul-Index": str(self.index)})

    def _document(self, request: web.Request) -> object:
        if request.path.endswith("/roots"):
            return {"Roots": [{"RootCert": self.authority.pem.decode()}]}
        if request.path == CHECKS:
            return {"Allowed": request.query["source"] in self.allowed}
        return self.leaf if "/leaf/" in request.path else []


@asynccontextmanager
async def following(agent: Agent) -> AsyncIterator[ConnectIdentity]:
    """Runs the identity of a decode worker against the agent."""
    app = web.Application()
    app.router.add_get("/{path:.*}", agent.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    settings = DiscoverySettings(address=f"{host}:{port}", backoff_max_s=0.2)
    identity = ConnectIdentity(
        settings, MeshRole.DECODE, clock=SystemClock(), generator=random.Random(1), wait_s=PATIENCE_S
    )
    try:
        await identity.start()
        running = asyncio.create_task(identity.run())
        yield identity
        await identity.aclose()
        await running
    finally:
        await identity.aclose()
        await runner.cleanup()


async def wait_for(caplog: pytest.LogCaptureFixture, event: str, count: int = 1) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sum(record.message == event for record in caplog.records) < count:
            await asyncio.sleep(0.01)


async def test_certificate_and_intentions_are_kept_while_the_agent_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The agent first has no leader and then serves an invalid certificate. The last valid state stays in use, and each outage is logged
    once.

    Renewal continues when the agent recovers.
    """
    caplog.set_level(logging.INFO)
    agent = Agent()
    async with following(agent) as identity:
        before = identity.current()
        agent.status = 500
        agent.change()
        await wait_for(caplog, "certificates_not_renewed")
        await wait_for(caplog, "intentions_not_followed")
        agent.allowed, agent.leaf, agent.status = {"kvmesh-router"}, {"CertPEM": "x"}, 200
        await wait_for(caplog, "intentions_followed_again")
        # A query waits again when its last answer has been used.
        await wait_until(lambda: len(agent.waiting) == 3, "roots, certificate and intentions are followed")
        assert identity.current() is before
        assert identity.allows(MeshRole.ROUTER) and not identity.allows(MeshRole.FRONTEND)
        agent.issue()
        agent.change()
        await wait_for(caplog, "certificates_renewed")
        assert identity.current() is not before
        assert sum(record.message == "certificates_not_renewed" for record in caplog.records) <= 2


async def test_a_denial_reaches_the_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    """Callbacks receive the roles that an intention newly denies."""
    agent, denied = Agent(), []
    async with following(agent) as identity:
        identity.on_denied(denied.extend)
        assert identity.allows(MeshRole.FRONTEND)
        agent.allowed = set()
        agent.change()
        async with asyncio.timeout(PATIENCE_S):
            while not denied:
                await asyncio.sleep(0.01)
        assert denied == [MeshRole.FRONTEND] and not identity.allows(MeshRole.FRONTEND)


async def test_an_expired_certificate_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """An expired certificate stays in use because existing connections continue. The log and the gauge report it."""
    agent = Agent()
    agent.issue(lifetime_h=-0.5)
    async with following(agent) as identity:
        await wait_for(caplog, "certificate_expired")
        assert identity.seconds_left() < 0 and identity.current().certificate


async def test_before_the_first_answer_no_call_is_allowed() -> None:
    """If the agent does not answer, starting fails after its time limit. There is no certificate, and no call is allowed."""
    settings = DiscoverySettings(address="127.0.0.1:1")
    identity = ConnectIdentity(settings, MeshRole.DECODE, clock=SystemClock(), generator=random.Random(1), wait_s=0.3)
    with pytest.raises(UnavailableError, match="no certificate and intentions within"):
        await identity.start()
    with pytest.raises(UnavailableError):
        identity.current()
    assert not any(identity.allows(role) for role in MeshRole)
    await identity.aclose()
