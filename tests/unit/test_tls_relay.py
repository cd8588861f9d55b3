"""Mesh TLS with certificates that have only a SPIFFE ID, over real gRPC servers on loopback."""

import tempfile
from pathlib import Path

import grpc
import pytest

from kvmesh.identity.certificates import Certificates
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.settings import RpcSettings
from tests.connect_authority import NAMES, PREFIX, UriAuthority
from tests.patience import PATIENCE_S
from tests.security.test_methods import Fixed, echo, serving

DESCRIBE = "/kvmesh.worker.v1.WorkerService/Describe"
ATTACH = "/kvmesh.decode.v1.DecodeService/Attach"
OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE


def entries(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def outcome(client: Certificates, address: str, role: MeshRole = MeshRole.DECODE) -> grpc.StatusCode:
    pool = ChannelPool(settings=RpcSettings(), mesh=Fixed(client))
    try:
        return await pool.channel(address, role).unary_unary(DESCRIBE)(b"", timeout=PATIENCE_S).code()
    finally:
        await pool.aclose()


async def test_only_a_server_of_the_expected_role_is_accepted() -> None:
    """The server's SPIFFE ID must match exactly. Another role, domain or authority is refused, and so is a client that trusts another root."""
    authority, stranger = UriAuthority(), UriAuthority()
    frontend = authority.member(MeshRole.FRONTEND)
    both = authority.pem + stranger.pem
    async with serving(Fixed(authority.member(MeshRole.DECODE))) as address:
        assert await outcome(frontend, address) is OK
        assert await outcome(frontend, address, MeshRole.PREFILL) is UNAVAILABLE
        assert await outcome(stranger.member(MeshRole.FRONTEND, trusted=both), address) is UNAVAILABLE
        assert await outcome(authority.member(MeshRole.FRONTEND, trusted=stranger.pem), address) is UNAVAILABLE
    for uri in (
        NAMES.server_uri(MeshRole.ROUTER),
        "spiffe://other.consul/ns/default/dc/dc1/svc/kvmesh-decode",
        f"{PREFIX}/svc/web",
    ):
        async with serving(Fixed(authority.issue(uri))) as address:
            assert await outcome(frontend, address) is UNAVAILABLE, uri


async def test_streams_continue_after_a_rotation() -> None:
    """Large messages arrive complete. After a change of the root the old stream continues, and new calls use the new certificates."""
    old, new = UriAuthority(), UriAuthority()
    both = old.pem + new.pem
    server, client = (
        Fixed(old.member(MeshRole.DECODE, trusted=both)),
        Fixed(old.member(MeshRole.FRONTEND, trusted=both)),
    )
    async with serving(server) as address:
        pool = ChannelPool(settings=RpcSettings(), mesh=client)
        stream = pool.channel(address).stream_stream(ATTACH)()
        await echo(stream, bytes(range(256)) * (16 << 10))
        server.certificates, client.certificates = new.member(MeshRole.DECODE), new.member(MeshRole.FRONTEND)
        assert await pool.channel(address).unary_unary(DESCRIBE)(b"", timeout=PATIENCE_S).code() is OK
        await echo(stream, b"still there")
        assert await outcome(old.member(MeshRole.FRONTEND, trusted=both), address) is UNAVAILABLE
        await pool.aclose()


async def test_no_files_remain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key is on disk while the pool runs, other users cannot enter its folder, and the folder is deleted with the pool."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    authority = UriAuthority()
    async with serving(Fixed(authority.member(MeshRole.DECODE))) as address:
        pool = ChannelPool(settings=RpcSettings(), mesh=Fixed(authority.member(MeshRole.FRONTEND)))
        assert await pool.channel(address).unary_unary(DESCRIBE)(b"", timeout=PATIENCE_S).code() is OK
        [folder] = entries(tmp_path)
        assert folder.stat().st_mode & 0o077 == 0
        assert [each.is_socket() for each in entries(folder)] == [True]
        await pool.drop(address)
        assert entries(folder) == []
        await pool.aclose()
    assert entries(tmp_path) == []


async def test_a_stopped_server_is_unavailable() -> None:
    """A call to a server that does not listen fails with UNAVAILABLE, as without the relay."""
    authority = UriAuthority()
    async with serving(Fixed(authority.member(MeshRole.DECODE))) as address:
        pass
    assert await outcome(authority.member(MeshRole.FRONTEND), address) is UNAVAILABLE
