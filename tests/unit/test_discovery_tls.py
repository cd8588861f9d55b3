"""The registry client over TLS: verification, client certificates, and error messages."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.discovery.base import Health, Registration
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings, DiscoverySettings
from kvmesh.errors import InvalidRequestError, UnavailableError
from kvmesh.identity.authority import Authority as MeshAuthority
from kvmesh.identity.certificates import mesh_server_credentials, source_of
from kvmesh.identity.credentials import make_credentials
from kvmesh.identity.roles import MeshRole
from tests.certificates import Authority
from tests.conformance.health_server import HealthServer
from tests.patience import PATIENCE_S
from tests.worker_rig import wait_until


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca", "kvmesh test CA")


def registry_of(settings: DiscoverySettings) -> ConsulRegistry:
    return ConsulRegistry(replace(settings, call_timeout_s=PATIENCE_S))


async def _put(settings: DiscoverySettings) -> bool:
    registry = registry_of(settings)
    try:
        return await registry.put("key", b"value")
    finally:
        await registry.aclose()


async def test_the_agent_is_verified_with_its_ca(authority: Authority) -> None:
    """Calls and watches work with the agent's CA, with an https:// address or with only the CA file."""
    pair = authority.issue("agent", "127.0.0.1")
    agent = EmbeddedAgent(AgentSettings(certificate_file=pair.certificate_file, key_file=pair.key_file))
    await agent.start()
    try:
        assert agent.address.startswith("https://")
        assert await _put(DiscoverySettings(address=agent.address, ca_file=authority.ca_file))
        registry = registry_of(DiscoverySettings(address=f"127.0.0.1:{agent.port}", ca_file=authority.ca_file))
        views = registry.watch("svc")
        assert not (await anext(views)).is_stale
        await registry.register(Registration(service="svc", instance_id="one", host="127.0.0.1", port=1))
        assert [instance.instance_id for instance in (await anext(views)).instances] == ["one"]
        await views.aclose()
        await registry.aclose()
    finally:
        await agent.aclose()


async def test_an_agent_of_another_ca_is_refused(authority: Authority, tmp_path: Path) -> None:
    """The client sends no request to an agent that its CA, or the system's, did not sign. The reason names the certificate."""
    pair = authority.issue("agent", "127.0.0.1")
    other = Authority(tmp_path / "other", "another CA")
    agent = EmbeddedAgent(AgentSettings(certificate_file=pair.certificate_file, key_file=pair.key_file))
    await agent.start()
    try:
        for ca_file in (other.ca_file, ""):
            with pytest.raises(UnavailableError) as failure:
                await _put(DiscoverySettings(address=agent.address, ca_file=ca_file))
            assert failure.value.reason == "registry_certificate"
        assert len(agent.state.keys) == 0
    finally:
        await agent.aclose()


async def test_the_server_name_is_verified(authority: Authority) -> None:
    """A certificate for another name is accepted only if that name is configured."""
    pair = authority.issue("server.dc1.consul")
    agent = EmbeddedAgent(AgentSettings(certificate_file=pair.certificate_file, key_file=pair.key_file))
    await agent.start()
    try:
        with pytest.raises(UnavailableError) as failure:
            await _put(DiscoverySettings(address=agent.address, ca_file=authority.ca_file))
        assert failure.value.reason == "registry_certificate"
        named = DiscoverySettings(address=agent.address, ca_file=authority.ca_file, server_name="server.dc1.consul")
        assert await _put(named)
    finally:
        await agent.aclose()


async def test_the_client_certificate_is_presented(authority: Authority) -> None:
    """An agent that requires client certificates accepts ours, and refuses a client without one."""
    pair, ours = authority.issue("agent", "127.0.0.1"), authority.issue("client")
    agent = EmbeddedAgent(
        AgentSettings(certificate_file=pair.certificate_file, key_file=pair.key_file, client_ca_file=authority.ca_file)
    )
    await agent.start()
    try:
        anonymous = DiscoverySettings(address=agent.address, ca_file=authority.ca_file)
        with pytest.raises(UnavailableError):
            await _put(anonymous)
        assert await _put(
            DiscoverySettings(
                address=agent.address,
                ca_file=authority.ca_file,
                certificate_file=ours.certificate_file,
                key_file=ours.key_file,
            )
        )
    finally:
        await agent.aclose()


async def test_grpc_check_over_mesh_tls(tmp_path: Path) -> None:
    """A gRPC health check passes if the agent has a certificate of the mesh, and is critical if it has one of another mesh."""
    own, other = [make_credentials(tmp_path / name, authority=MeshAuthority.make()) for name in ("own", "other")]
    source = source_of(own.tls_directory(MeshRole.DECODE))
    assert source is not None
    server = HealthServer(mesh_server_credentials(source))
    await server.start()
    mine = Registration(
        service="svc", instance_id="one", host="127.0.0.1", port=server.port, ttl_s=2 * PATIENCE_S, uses_tls=True
    )
    for credentials, health in ((own, Health.PASSING), (other, Health.CRITICAL)):
        agent = EmbeddedAgent(AgentSettings(check_tls_directory=credentials.tls_directory(MeshRole.REGISTRY)))
        await agent.start()
        registry = registry_of(DiscoverySettings(address=agent.address, checks_tls=True))
        await registry.register(mine)
        await registry.heartbeat("one")
        check = agent.state.catalog.services["one"].checks["one:grpc"]
        # Before its first result, a check is critical and has no output.
        await wait_until(lambda check=check, health=health: check.output and check.status is health, f"it is {health}")  # type: ignore[misc]
        assert (await registry.instances("svc")).instances[0].health is health
        await registry.aclose()
        await agent.aclose()
    await server.stop()


async def test_a_registry_without_a_certificate_relies_on_heartbeats() -> None:
    """A registry without a certificate could not connect to a service with mesh TLS, and would report it as critical."""
    agent = EmbeddedAgent()
    await agent.start()
    registry = registry_of(DiscoverySettings(address=agent.address))
    await registry.register(
        Registration(service="svc", instance_id="one", host="127.0.0.1", port=1, ttl_s=PATIENCE_S, uses_tls=True)
    )
    await registry.heartbeat("one")
    assert (await registry.instances("svc")).instances[0].health is Health.PASSING
    assert [check for service in agent.state.catalog.services.values() for check in service.checks] == ["one:ttl"]
    await registry.aclose()
    await agent.aclose()


@pytest.mark.parametrize("field", ["ca_file", "certificate_file"])
def test_unreadable_files_are_reported(authority: Authority, tmp_path: Path, field: str) -> None:
    """The client's constructor reports a missing or invalid PEM file with the name of its setting."""
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no PEM")
    for path in (str(tmp_path / "absent.pem"), str(nonsense)):
        files = {"ca_file": authority.ca_file, field: path}
        with pytest.raises(InvalidRequestError) as refusal:
            ConsulRegistry(DiscoverySettings(address="https://127.0.0.1:1", **files))
        assert refusal.value.field == field


@pytest.mark.parametrize(
    "address", ["", "ftp://a:1", "a:b", "http://a:1/path", "http://", "a:0", "http://u@a:1", "a:1?x", "[::1"]
)
def test_invalid_addresses_are_refused(address: str) -> None:
    """The client's constructor refuses an invalid address with the name of the setting."""
    with pytest.raises(InvalidRequestError) as refusal:
        ConsulRegistry(DiscoverySettings(address=address))
    assert refusal.value.field == "address"


def test_token_is_not_printed() -> None:
    """The `repr` of settings hides the token, so that it does not get into logs."""
    assert "s3cret" not in repr(DiscoverySettings(token="s3cret")) + repr(AgentSettings(token="s3cret"))
