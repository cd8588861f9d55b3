"""Names and documents of Consul Connect, and the end of calls whose role is denied. These tests need no Consul."""

import asyncio
import json

import pytest

from kvmesh.discovery.acl import NEEDED_INTENTIONS
from kvmesh.discovery.base import DECODE, PREFILL, Health, Instance, View
from kvmesh.discovery.connect.documents import read_allowed, read_issued
from kvmesh.discovery.identity import AddressBook
from kvmesh.errors import InvalidRequestError, PermissionDeniedError, UnavailableError
from kvmesh.identity.permissions import PERMISSIONS, callers_of, servers_of
from kvmesh.identity.roles import MeshRole, connect_names
from kvmesh.rpc.revoking import RunningCalls
from tests.connect_authority import UriAuthority

PREFIX = "spiffe://11111111-2222-3333.consul/ns/default/dc/dc1"
COMMON_NAME = "kvmeshdecode.svc.default.11111111.consul"


def test_members_have_the_same_domain_namespace_and_data_centre() -> None:
    """Similar identities with another domain, data centre or service name have no role."""
    names = connect_names(f"{PREFIX}/svc/kvmesh-decode", COMMON_NAME, MeshRole.DECODE)
    assert all(names.role_of(names.server_uri(role)) is role for role in MeshRole)
    assert names.server_name(MeshRole.ROUTER) == "kvmeshrouter.svc.default.11111111.consul"
    for outsider in (
        "spiffe://other.consul/ns/default/dc/dc1/svc/kvmesh-decode",
        f"{PREFIX[:-1]}2/svc/kvmesh-decode",
        f"{PREFIX}/svc/kvmesh-root",
        f"{PREFIX}/svc/web",
        f"{PREFIX}/svc/kvmesh-decode/x",
        f"{PREFIX}/svc/kvmesh-",
        "",
    ):
        assert names.role_of(outsider) is None, outsider


@pytest.mark.parametrize("common_name", ["", "decode", COMMON_NAME.replace("decode", "router")])
def test_common_names_are_used_only_in_consuls_format(common_name: str) -> None:
    """If the common name has another format than Consul's, the whole SPIFFE ID is compared."""
    names = connect_names(f"{PREFIX}/svc/kvmesh-decode", common_name, MeshRole.DECODE)
    assert names.server_name(MeshRole.DECODE) == ""
    assert names.server_uri(MeshRole.DECODE) == f"{PREFIX}/svc/kvmesh-decode"


@pytest.mark.parametrize("uri", [f"{PREFIX}/svc/kvmesh-router", "spiffe://kvmesh/svc/kvmesh-decode", "x"])
def test_a_certificate_of_another_service_is_refused(uri: str) -> None:
    with pytest.raises(InvalidRequestError, match="not for the service kvmesh-decode"):
        connect_names(uri, "", MeshRole.DECODE)


def test_inconsistent_documents_are_refused() -> None:
    """Truncated, empty or mismatched documents raise UnavailableError, so that the earlier certificate stays in use."""
    authority = UriAuthority()
    one, other = authority.member(MeshRole.DECODE), authority.member(MeshRole.DECODE)
    roots: dict[str, object] = {"Roots": [{"RootCert": authority.pem.decode()}]}
    good = leaf(one.certificate, one.key)
    assert read_issued(encoded(good), encoded(roots), MeshRole.DECODE).certificates.key == one.key
    outsider = authority.member(MeshRole.ROUTER)
    for wrong in (
        [],
        {},
        leaf(one.certificate, other.key),
        leaf(one.key, one.key),
        leaf(outsider.certificate, outsider.key),
    ):
        with pytest.raises(UnavailableError):
            read_issued(encoded(wrong), encoded(roots), MeshRole.DECODE)
    for wrong in ([], {}, {"Roots": []}, {"Roots": [{"RootCert": "x"}]}):
        with pytest.raises(UnavailableError):
            read_issued(encoded(good), encoded(wrong), MeshRole.DECODE)
    with pytest.raises(UnavailableError):
        read_issued(b"", encoded(roots), MeshRole.DECODE)


def leaf(certificate: bytes, key: bytes) -> dict[str, str]:
    return {"CertPEM": certificate.decode(), "PrivateKeyPEM": key.decode()}


def encoded(document: object) -> bytes:
    return json.dumps(document).encode()


@pytest.mark.parametrize("answer", [b'{"Allowed": 1}', b'{"Allowed": "true"}', b"{}", b'{"Allowed": false}'])
def test_only_a_boolean_true_allows(answer: bytes) -> None:
    assert read_allowed(b'{"Allowed": true}')
    assert not read_allowed(answer)


def test_intentions_match_the_table_of_permissions() -> None:
    """Bootstrap allows the calls in the table of permissions, and no others. Each method of the table has a server."""
    assert callers_of(MeshRole.ROUTER) == {MeshRole.FRONTEND, MeshRole.ROUTER, MeshRole.PLANNER, MeshRole.OPERATOR}
    assert MeshRole.SCALER not in callers_of(MeshRole.DECODE) and callers_of(MeshRole.FRONTEND) == frozenset()
    assert ("kvmesh-frontend", "kvmesh-decode") in NEEDED_INTENTIONS
    assert ("kvmesh-prefill", "kvmesh-router") not in NEEDED_INTENTIONS
    unserved = [method for method in PERMISSIONS if not servers_of(method) and not method.startswith("/grpc.health.")]
    assert unserved == []


def test_the_newest_listing_determines_the_role() -> None:
    """A worker can change its pool. An address that is no longer listed keeps its role, because workers keep serving during an outage."""
    book = AddressBook()
    book.note(view(DECODE, 1))
    assert book.role_of("h:1") is MeshRole.DECODE
    book.note(view(PREFILL, 1))
    book.note(view(DECODE))
    assert book.role_of("h:1") is MeshRole.PREFILL and book.role_of("h:2") is None


def view(service: str, *ports: int) -> View:
    made = [
        Instance(
            service=service,
            instance_id=f"{service}-{port}",
            host="h",
            port=port,
            meta={},
            tags=(),
            health=Health.PASSING,
            is_draining=False,
        )
        for port in ports
    ]
    return View(service=service, index=1, instances=made)


async def test_denied_calls_end_and_other_calls_continue() -> None:
    """Calls of the denied role raise PermissionDeniedError. Calls of other roles, and calls cancelled for other reasons, are unaffected."""
    calls, release = RunningCalls(), asyncio.Event()

    async def call(role: MeshRole) -> str:
        with calls.call_of(role):
            await release.wait()
        return "done"

    tasks = [asyncio.create_task(call(role)) for role in (MeshRole.FRONTEND, MeshRole.ROUTER, MeshRole.PLANNER)]
    await asyncio.sleep(0)
    calls.end({MeshRole.FRONTEND})
    tasks[2].cancel()
    release.set()
    denied, allowed, cancelled = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(denied, PermissionDeniedError) and denied.reason == "intention_denied"
    assert allowed == "done" and isinstance(cancelled, asyncio.CancelledError)


async def test_a_cancellation_together_with_a_denial_stays_a_cancellation() -> None:
    """A call that is denied and cancelled at the same time raises CancelledError, because its client no longer waits."""
    calls = RunningCalls()

    async def call() -> None:
        with calls.call_of(MeshRole.FRONTEND):
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    calls.end({MeshRole.FRONTEND})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
