"""Authorisation of gRPC methods: every method, with the certificate of every role and with certificates that are not the mesh's."""

import asyncio
import datetime
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvmesh.api.decode.v1 import decode_pb2
from kvmesh.api.externalscaler import externalscaler_pb2
from kvmesh.api.planner.v1 import planner_pb2, scaler_pb2
from kvmesh.api.prefill.v1 import prefill_pb2
from kvmesh.api.router.v1 import router_pb2
from kvmesh.api.worker.v1 import worker_pb2
from kvmesh.identity.authority import Authority
from kvmesh.identity.certificates import Certificates, CertificateSource, DirectorySource
from kvmesh.identity.credentials import write_certificates
from kvmesh.identity.permissions import PERMISSIONS, is_audited
from kvmesh.identity.roles import MeshRole, role_of, uri_of
from kvmesh.rpc.authorisation import AUDIT_LOGGER
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.telemetry import Telemetry
from tests.patience import PATIENCE_S

REFUSED = grpc.StatusCode.PERMISSION_DENIED
SHUT = grpc.StatusCode.UNAVAILABLE
OWN = ("/kvmesh.", "/externalscaler.")
"""Packages of the services whose methods mesh TLS authorises."""


class Fixed:
    """A certificate source whose certificates a test replaces."""

    def __init__(self, certificates: Certificates) -> None:
        self.certificates = certificates

    def current(self) -> Certificates:
        return self.certificates


class AnyMethod(grpc.GenericRpcHandler):
    """Answers every method of the mesh."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if not str(handler_call_details.method).startswith(OWN):
            return None

        async def answer(request: bytes, context: Any) -> bytes:
            return b"done"

        async def stream(requests: Any, context: Any) -> None:
            async for request in requests:
                await context.write(request)

        if str(handler_call_details.method).endswith("Attach"):
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(answer)


@asynccontextmanager
async def serving(source: CertificateSource) -> AsyncIterator[str]:
    """Runs a server with mesh TLS. Yields its address."""
    server = RpcServer(
        RpcSettings(grace_s=0),
        service_names=(),
        add_services=lambda server: server.add_generic_rpc_handlers((AnyMethod(),)),
        interceptors=server_interceptors(Telemetry.create("worker"), source),
        mesh=source,
    )
    await server.start()
    try:
        yield server.address
    finally:
        await server.aclose()


async def call(address: str, method: str, certificates: Certificates | None) -> grpc.StatusCode:
    """Makes one call. Returns its status."""
    pool = ChannelPool(settings=RpcSettings(), mesh=None if certificates is None else Fixed(certificates))
    try:
        return await pool.channel(address).unary_unary(method)(b"", timeout=PATIENCE_S).code()
    finally:
        await pool.aclose()


def test_the_table_has_every_method_of_the_mesh() -> None:
    """The table lists all methods of the mesh and no others. A method that is not listed is refused for all roles."""
    files = (router_pb2, worker_pb2, prefill_pb2, decode_pb2, planner_pb2, scaler_pb2, externalscaler_pb2)
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods == {method for method in PERMISSIONS if method.startswith(OWN)}


async def test_each_method_is_limited_to_its_roles() -> None:
    """A member of the mesh can call only the methods of its role: a worker cannot drain others, a planner cannot submit legs."""
    authority = Authority.make()
    async with serving(Fixed(authority.issue(MeshRole.DECODE))) as address:
        for role in MeshRole:
            pool = ChannelPool(settings=RpcSettings(), mesh=Fixed(authority.issue(role)))
            for method, roles in PERMISSIONS.items():
                if method.startswith(OWN) and not method.endswith("Attach"):
                    code = await pool.channel(address).unary_unary(method)(b"", timeout=PATIENCE_S).code()
                    assert code is (grpc.StatusCode.OK if role in roles else REFUSED), (role, method)
            await pool.aclose()


@pytest.mark.parametrize("method", ["Describe", "Drain", "WatchKv"])
async def test_clients_without_a_valid_certificate_reach_no_method(method: str) -> None:
    """Without a certificate, in plain text, or with a certificate of another mesh or an expired one, the connection fails before a method is
    called."""
    authority, stranger = Authority.make(), Authority.make()
    expired = authority.issue(MeshRole.OPERATOR, lifetime=-datetime.timedelta(minutes=1))
    forged = stranger.issue(MeshRole.OPERATOR)
    mixed = Certificates(certificate=forged.certificate, key=forged.key, authority=authority.certificate_pem)
    name = f"/kvmesh.worker.v1.WorkerService/{method}"
    async with serving(Fixed(authority.issue(MeshRole.DECODE))) as address:
        for certificates in (None, mixed, expired):
            assert await call(address, name, certificates) is SHUT
        bare = grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(authority.certificate_pem),
            options=[("grpc.ssl_target_name_override", "member.kvmesh")],
        )
        assert await bare.unary_unary(name)(b"", timeout=PATIENCE_S).code() is SHUT
        await bare.close()


@pytest.mark.parametrize("role", [MeshRole.FRONTEND, MeshRole.OPERATOR, MeshRole.REGISTRY])
async def test_a_member_without_a_serving_role_cannot_impersonate_a_worker(role: MeshRole) -> None:
    """A frontend does not connect to a server whose certificate has a role that serves no legs, such as an operator's."""
    authority = Authority.make()
    async with serving(Fixed(authority.issue(role))) as address:
        code = await call(address, "/kvmesh.worker.v1.WorkerService/Describe", authority.issue(MeshRole.FRONTEND))
        assert code is SHUT


async def test_operator_calls_are_audited(caplog: pytest.LogCaptureFixture) -> None:
    """The audit log has method, caller and outcome of an operator's changes. It has no reads, and no calls of other roles."""
    authority = Authority.make()
    with caplog.at_level(logging.INFO, AUDIT_LOGGER):
        async with serving(Fixed(authority.issue(MeshRole.DECODE))) as address:
            for name in ("Drain", "Describe"):
                method = f"/kvmesh.worker.v1.WorkerService/{name}"
                assert await call(address, method, authority.issue(MeshRole.OPERATOR)) is grpc.StatusCode.OK
            await call(address, "/kvmesh.worker.v1.WorkerService/Sleep", authority.issue(MeshRole.ROUTER))
    (record,) = [record for record in caplog.records if record.name == AUDIT_LOGGER]
    data = record.__dict__["data"]
    assert data["method"].endswith("/Drain") and data["outcome"] == "done" and data["caller"] == "kvmesh operator"


def test_roles_and_uris() -> None:
    """Roles are read from kvmesh's and Consul Connect's URIs, and from no others."""
    assert all(role_of(uri_of(role)) is role for role in MeshRole)
    connect = "spiffe://11111111-2222.consul/ns/default/dc/dc1/svc/kvmesh-decode"
    assert role_of(connect) is MeshRole.DECODE
    for wrong in (
        "",
        "spiffe://kvmesh/svc/kvmesh-root",
        "http://kvmesh/svc/kvmesh-decode",
        uri_of(MeshRole.ROUTER) + "x",
    ):
        assert role_of(wrong) is None
    assert is_audited(MeshRole.OPERATOR, "/kvmesh.decode.v1.DecodeService/Generate")


async def test_certificate_rotation_ends_no_stream(tmp_path: Path) -> None:
    """After both sides get certificates of a new authority, an existing stream continues, and new connections use the new certificates."""
    old, new = Authority.make(), Authority.make()
    both = old.certificate_pem + new.certificate_pem
    write(tmp_path / "server", old.issue(MeshRole.DECODE), both)
    server, client = DirectorySource(str(tmp_path / "server")), Fixed(trusting(old.issue(MeshRole.FRONTEND), both))
    async with serving(server) as address:
        pool = ChannelPool(settings=RpcSettings(), mesh=client)
        stream = pool.channel(address).stream_stream("/kvmesh.decode.v1.DecodeService/Attach")()
        await echo(stream, b"1")
        # A half-written folder does not change the certificates.
        (tmp_path / "server" / "tls.key").write_bytes(new.issue(MeshRole.DECODE).key)
        await asyncio.sleep(1.1)
        assert server.current().authority == both
        write(tmp_path / "server", new.issue(MeshRole.DECODE), new.certificate_pem)
        async with asyncio.timeout(PATIENCE_S):
            while server.current().authority == both:
                await asyncio.sleep(0.1)
        client.certificates = new.issue(MeshRole.FRONTEND)
        method = "/kvmesh.worker.v1.WorkerService/Describe"
        assert await pool.channel(address).unary_unary(method)(b"", timeout=PATIENCE_S).code() is grpc.StatusCode.OK
        await echo(stream, b"2")
        assert await call(address, method, old.issue(MeshRole.FRONTEND)) is SHUT
        await pool.aclose()


def write(folder: Path, certificates: Certificates, authority: bytes) -> None:
    write_certificates(folder, trusting(certificates, authority))


def trusting(certificates: Certificates, authority: bytes) -> Certificates:
    return Certificates(certificate=certificates.certificate, key=certificates.key, authority=authority)


async def echo(stream: Any, word: bytes) -> None:
    await stream.write(word)
    assert await stream.read() == word
