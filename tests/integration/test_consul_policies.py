"""The policies of compose/consul and `kvmesh consul-bootstrap`, on a real Consul that denies by default."""

import random
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvmesh.cli.consul_bootstrap import OUTSIDERS, POLICIES
from kvmesh.clock import SystemClock
from kvmesh.discovery.base import SERVICES, Registration
from kvmesh.discovery.connect.identity import ConnectIdentity
from kvmesh.discovery.connection import ConsulConnection
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.errors import MeshError, PermissionDeniedError
from kvmesh.identity.roles import MeshRole
from tests.connect_mesh import SecuredConsul, bootstrap_command, secured_consul, wait_for
from tests.patience import PATIENCE_S

GENERATOR = random.Random(1)
OWN = {
    "frontend": {"kvmesh-frontend"},
    "router": {"kvmesh-router"},
    "gateway": {"kvmesh-frontend", "kvmesh-router"},
    "prefill": {"kvmesh-prefill"},
    "decode": {"kvmesh-decode"},
    "worker": {"kvmesh-prefill", "kvmesh-decode"},
    "planner": {"kvmesh-planner"},
    "operator": set(),
    "prometheus": set(),
}
"""The services that each policy may register, in addition to kvmesh-operator."""
KEYS = {"prefill": {"kvmesh/workers/x"}, "decode": {"kvmesh/workers/x"}, "worker": {"kvmesh/workers/x"}}
KEYS["planner"] = {"kvmesh/planner/leader"}
READERS = {"frontend", "gateway", "prefill", "decode", "worker", "operator"}
"""Policies that may read descriptions of workers."""


@pytest.fixture(scope="module")
def consul(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredConsul]:
    with secured_consul(tmp_path_factory.mktemp("policies")) as made:
        wait_for(lambda: made.call("GET", "/v1/agent/connect/ca/roots")["Roots"], lambda: "no roots")
        yield made


async def is_allowed(attempt: Callable[[], Awaitable[object]]) -> bool:
    try:
        await attempt()
    except PermissionDeniedError:
        return False
    return True


@pytest.mark.parametrize("name", OWN)
async def test_each_policy_allows_its_own_writes_only(consul: SecuredConsul, name: str) -> None:
    """Tries with each role's token to register, get a certificate, write a key, open a session and change an intention. Whatever belongs to
    another role is refused."""
    registry, connection = ConsulRegistry(consul.settings(name)), ConsulConnection(consul.settings(name))
    services = [*SERVICES, "kvmesh-operator", "web"]
    keys = ["kvmesh/workers/x", "kvmesh/planner/leader", "kvmesh/keys", "other/key"]
    try:
        registered, certified = set(), set()
        for service in services:
            registration = Registration(service=service, instance_id=f"{name}-{service}", host="127.0.0.1", port=1)
            if await is_allowed(lambda registration=registration: registry.register(registration)):
                registered.add(service)
                await registry.deregister(registration.instance_id)
            leaf = f"/v1/agent/connect/ca/leaf/{service}"
            if await is_allowed(lambda leaf=leaf: connection.call("GET", leaf)):
                certified.add(service)
        written = {key for key in keys if await is_allowed(lambda key=key: registry.put(key, b"x"))}
        readable = await is_allowed(lambda: registry.get("kvmesh/workers/x"))
        sessions = await is_allowed(lambda: registry.create_session(name="x", ttl_s=10))
        body = {"SourceName": "web", "DestinationName": "kvmesh-decode", "SourceType": "consul", "Action": "allow"}
        intentions = await is_allowed(lambda: connection.call("POST", "/v1/connect/intentions", body=body))
    finally:
        await registry.aclose()
        await connection.aclose()
    own = OWN[name] | ({"kvmesh-operator"} if name == "operator" else set())
    assert registered == certified == own
    assert written == KEYS.get(name, set())
    assert sessions is (name == "planner")
    assert readable is (name in READERS)
    assert not intentions


def test_bootstrap_can_be_repeated(consul: SecuredConsul) -> None:
    """The second run creates and prints no tokens, and keeps intentions that were changed. A deleted token is replaced."""
    files = {path: path.read_bytes() for path in consul.credentials.rglob("*") if path.is_file()}
    assert {path.parent.name for path in files if path.name == "registry-token"} == set(POLICIES)
    assert not any((consul.credentials / name / "mesh-secret").exists() for name in OUTSIDERS)
    for path in (consul.credentials, *consul.credentials.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    consul.set_intention("kvmesh-frontend", "kvmesh-router", "deny")
    done = bootstrap_command(consul.server.address, consul.credentials)
    assert done.returncode == 0 and "0 new tokens, 0 new intentions" in done.stdout, done
    assert {path: path.read_bytes() for path in files} == files
    assert not any(content.decode() in done.stdout + done.stderr for content in files.values())
    listed = consul.call("GET", "/v1/connect/intentions")
    assert [each["DestinationName"] for each in listed if each["Action"] == "deny"] == ["kvmesh-router"]
    token = (consul.credentials / "router" / "registry-token").read_text()
    tokens = consul.call("GET", "/v1/acl/tokens")
    [router] = [each for each in tokens if [p["Name"] for p in each.get("Policies") or ()] == ["kvmesh-router"]]
    consul.call("DELETE", f"/v1/acl/token/{router['AccessorID']}")
    assert "1 new tokens" in bootstrap_command(consul.server.address, consul.credentials).stdout
    assert (consul.credentials / "router" / "registry-token").read_text() != token


def test_bootstrap_without_a_management_token(consul: SecuredConsul, tmp_path: Path) -> None:
    """Bootstrap into an empty folder fails if Consul's ACLs already exist, and the error names the flag to use."""
    done = bootstrap_command(consul.server.address, tmp_path / "other")
    assert done.returncode == 1 and "--management-token-file" in done.stderr, done


async def test_a_worker_changes_its_role_with_its_policy(consul: SecuredConsul) -> None:
    """The policy `worker` may get the other role's identity. The policy `decode` may not, and keeps its own."""
    for name, is_possible in (("worker", True), ("decode", False)):
        identity = ConnectIdentity(
            consul.settings(name), MeshRole.DECODE, clock=SystemClock(), generator=GENERATOR, wait_s=PATIENCE_S
        )
        try:
            await identity.start()
            before = identity.current()
            with nullcontext() if is_possible else pytest.raises(PermissionDeniedError):
                (await identity.prepare(MeshRole.PREFILL))()
            assert (identity.current() is before) is not is_possible
            assert identity.allows(MeshRole.FRONTEND) and not identity.allows(MeshRole.SCALER)
        finally:
            await identity.aclose()


class TimesOut(SystemClock):
    """The first pause outlasts the timeout."""

    async def sleep(self, delay_s: float) -> None:
        raise TimeoutError


async def test_a_service_without_a_certificate_does_not_start(consul: SecuredConsul) -> None:
    """If the token has no rights to the service's identity, the start fails in bounded time with the reason."""
    for clock, wait_s, words in (
        (SystemClock(), 0.1, "kvmesh-decode no certificate"),  # Perhaps before Consul has answered.
        (TimesOut(), PATIENCE_S, r"kvmesh-decode no certificate.*403"),
    ):
        identity = ConnectIdentity(
            consul.settings("router"), MeshRole.DECODE, clock=clock, generator=GENERATOR, wait_s=wait_s
        )
        with pytest.raises(MeshError, match=words):
            await identity.start()
        await identity.aclose()
