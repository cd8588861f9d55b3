"""Addresses and ports of services: defaults, validation, and the environment of UCX."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import aiohttp
import pytest

from kvmesh.discovery.base import FRONTEND, Health, Instance
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import InvalidRequestError, MeshError, UnavailableError
from kvmesh.identity.settings import MeshSettings
from kvmesh.network import ports as ports_module
from kvmesh.network.causes import connection_cause
from kvmesh.network.names import LOOPBACK, host_port, peer_host, registry_host
from kvmesh.network.place import check_advertised, choose_address, place_service
from kvmesh.network.ports import PortRange
from kvmesh.network.ucx import interface_of, ucx_variables
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import SettingsError, load
from services.frontend.settings import FrontendSettings, HttpSettings
from services.planner.settings import PlannerSettings
from services.router.settings import RouterSettings
from tests.own_address import own_address
from tests.servers import closed_port

REMOTE = "192.0.2.77"


@pytest.fixture
def address() -> Iterator[str]:
    with own_address() as found:
        yield found


@pytest.fixture(autouse=True)
def _free_claims() -> Iterator[None]:
    """Releases the ports that a test claimed, because claims last until the process ends."""
    kept = list(ports_module._claims)
    yield
    for claim in ports_module._claims[len(kept) :]:
        claim.close()
    del ports_module._claims[len(kept) :]


def free_range(count: int) -> int:
    """Returns the first of so many adjacent ports that are free and unclaimed. Ports of the ephemeral range may be taken at any time.

    The choice depends on the process id, so that test runs at the same time use different ports.
    """
    first, total = ports_module._quiet_ports()
    blocks = total // count
    for attempt in range(blocks):
        port = first + count * ((os.getpid() + attempt) % blocks)
        claimed = [each for each in range(port, port + count) if ports_module._claim(LOOPBACK, each)]
        for _ in claimed:
            ports_module._claims.pop().close()
        if len(claimed) == count:
            return port
    raise AssertionError(f"no {count} adjacent ports are free")


def at(registry: str, **changes: str) -> PlannerSettings:
    return PlannerSettings(discovery=DiscoverySettings(address=registry), **changes)


@pytest.mark.parametrize("registry", ["127.0.0.1:8500", "http://localhost:8500", "[::1]:8500", "127.0.0.9:1"])
def test_a_registry_on_this_machine_keeps_everything_on_loopback(registry: str) -> None:
    """With default settings no port is open to the network."""
    placed = place_service(at(registry))
    assert (placed.rpc.host, placed.rpc.advertised_host, placed.telemetry.metrics_host) == (LOOPBACK,) * 3
    assert (placed.rpc.port, placed.telemetry.metrics_port) == (0, 0)


def test_a_remote_registry_gives_the_address_that_reaches_it(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """gRPC, metrics and HTTP listen on the local address that reaches the registry, gRPC registers it, and the log states the address and the
    reason."""
    settings = FrontendSettings(discovery=DiscoverySettings(address=f"{address}:8500"), insecure_listen=True)
    with caplog.at_level(logging.INFO):
        placed = place_service(settings)
    hosts = (placed.rpc.host, placed.rpc.advertised_host, placed.telemetry.metrics_host, placed.http.host)
    assert hosts == (address,) * 4
    [record] = [each for each in caplog.records if each.message == "address_chosen"]
    assert record.data["address"] == address  # type: ignore[attr-defined]
    assert address in record.data["detail"]  # type: ignore[attr-defined]


def test_address_is_the_default_of_hosts(address: str) -> None:
    """`--address` sets every host that has no setting of its own, even if the registry is on loopback."""
    settings = FrontendSettings(address=address, http=HttpSettings(host=LOOPBACK), insecure_listen=True)
    placed = place_service(settings)
    assert (placed.rpc.host, placed.http.host) == (address, LOOPBACK)


def test_a_name_is_resolved_once() -> None:
    """A host name is resolved to an address before it is registered, so that peers need not resolve it."""
    chosen = choose_address("localhost", "127.0.0.1")
    assert chosen.host in (LOOPBACK, "::1")
    with pytest.raises(UnavailableError, match=r"nowhere\.invalid"):
        choose_address("nowhere.invalid", "127.0.0.1")


def test_an_unspecified_address_needs_an_address_to_register(address: str) -> None:
    """A service that listens on 0.0.0.0 must have another address to register: `--address` or `advertise_host`."""
    everywhere = RpcSettings(host="0.0.0.0")
    placed = place_service(PlannerSettings(address=address, rpc=everywhere, insecure_listen=True))
    assert (placed.rpc.host, placed.rpc.advertised_host) == ("0.0.0.0", address)
    for host in ("0.0.0.0", "::"):
        with pytest.raises(InvalidRequestError, match="--address") as refused:
            place_service(PlannerSettings(rpc=RpcSettings(host=host)))
        assert refused.value.reason == "address_unspecified"
    named = RpcSettings(host="0.0.0.0", advertise_host="worker-7.example")
    assert place_service(PlannerSettings(rpc=named, insecure_listen=True)).rpc.advertised_host == "worker-7.example"


def test_plain_text_services_listen_on_loopback_only(address: str) -> None:
    """A service needs mesh TLS or `--insecure-listen` to listen on another address. Loopback needs neither."""
    for rpc in (RpcSettings(), RpcSettings(host="0.0.0.0")):
        for settings in (PlannerSettings(address=address, rpc=rpc), FrontendSettings(address=address)):
            with pytest.raises(InvalidRequestError, match="--insecure-listen") as refused:
                place_service(settings)
            assert refused.value.reason == "insecure_listen"
    mesh = MeshSettings(tls_directory="certificates")
    assert place_service(PlannerSettings(address=address, mesh=mesh)).rpc.host == address
    assert place_service(PlannerSettings()).rpc.host == LOOPBACK


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_loopback_is_not_registered_at_a_remote_registry(host: str) -> None:
    """Services on other machines that use a registered loopback address would connect to themselves."""
    with pytest.raises(InvalidRequestError, match="--address") as refused:
        check_advertised(host, REMOTE)
    assert refused.value.reason == "address_loopback"
    check_advertised(host, "127.0.0.1")
    check_advertised(REMOTE, REMOTE)


@pytest.mark.parametrize(("given", "why"), [(REMOTE, "not an address of this machine"), ("0.0.0.0", "--rpc-host")])
def test_an_address_of_another_machine_is_refused(given: str, why: str) -> None:
    """Choosing an address that this machine cannot listen on fails, and the error states the reason."""
    with pytest.raises(InvalidRequestError, match=why):
        choose_address(given, "127.0.0.1")


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:4711", "10.0.0.1"),
        ("ipv6:%5Bfd00::1%5D:4711", "fd00::1"),
        ("ipv6:[fd00::1]:4711", "fd00::1"),
        ("unix:/run/kvmesh.socket", ""),
        ("memory", ""),
    ],
)
def test_peer_host_parses_grpc_peers(peer: str, host: str) -> None:
    assert peer_host(peer) == host


def test_ipv6_addresses() -> None:
    """Brackets are removed from hosts, and added where a port follows."""
    assert choose_address("[::1]", "127.0.0.1").host == "::1"
    assert host_port("fd00::2", 80) == "[fd00::2]:80"
    assert host_port("[fd00::2]", 80) == "[fd00::2]:80"
    assert registry_host("[fd00::2]:8500") == registry_host("https://[fd00::2]") == "fd00::2"
    instance = Instance(
        service=FRONTEND,
        instance_id="f",
        host="fd00::2",
        port=5,
        meta={},
        tags=(),
        health=Health.PASSING,
        is_draining=False,
    )
    assert instance.address == "[fd00::2]:5"


@pytest.mark.parametrize("text", ["20000", "20000-", "a-b", "0-100", "20010-20000", "20000-70000", "20000-20003"])
@pytest.mark.parametrize("cls", [FrontendSettings, RouterSettings])
def test_an_invalid_port_range_is_refused(cls: type, text: str) -> None:
    """An invalid range is a settings error that names the setting."""
    with pytest.raises(SettingsError, match="port_range"):
        load(cls, argv=["--port-range", text], environ={})


def test_ports_come_from_the_first_half_of_the_range() -> None:
    """Ports are taken in order. Busy ports and ports that other services claimed are skipped. A full range is an error."""
    first = free_range(12)
    ports = PortRange.parse(f"{first}-{first + 11}")
    with socket.create_server((LOOPBACK, first)):
        placed = place_service(PlannerSettings(port_range=f"{first}-{first + 11}"))
        assert (placed.rpc.port, placed.telemetry.metrics_port) == (first + 1, first + 2)
        other = f"from kvmesh.network.ports import PortRange; print(PortRange(first={first}, last={first + 11}).claim('127.0.0.1'))"
        found = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True)
        assert int(found.stdout) == first + 3
        # The process has ended, so its port is free again.
        assert [ports.claim(LOOPBACK) for _ in range(3)] == [first + 3, first + 4, first + 5]
        with pytest.raises(UnavailableError, match="--port-range") as full:
            ports.claim(LOOPBACK)
    assert full.value.reason == "no_free_port"


def test_a_configured_port_is_kept() -> None:
    """A port range does not replace a port that the settings name."""
    first = free_range(12)
    placed = place_service(PlannerSettings(port_range=f"{first}-{first + 11}", rpc=RpcSettings(port=7)))
    assert (placed.rpc.port, placed.telemetry.metrics_port) == (7, first)


def test_a_full_port_range_of_ucx_is_refused() -> None:
    """Without enough free ports UCX would retry forever."""
    first = free_range(8)
    ports = PortRange.parse(f"{first}-{first + 7}")
    ports.check_ucx(LOOPBACK)
    assert ports.ucx == f"{first + 4}-{first + 7}"
    servers = [socket.create_server((LOOPBACK, first + number)) for number in (4, 5, 6)]
    try:
        with pytest.raises(UnavailableError, match=ports.ucx):
            ports.check_ucx(LOOPBACK)
    finally:
        for server in servers:
            server.close()


def test_environment_variables_of_ucx() -> None:
    """The variables name the interface and its RDMA devices, the address family and the port range."""
    ports = PortRange.parse("21200-21207")
    assert ucx_variables(LOOPBACK, interface="lo", ports=None) == {"UCX_NET_DEVICES": "lo"}
    assert ucx_variables(LOOPBACK, interface="", ports=ports) == {"UCX_TCP_PORT_RANGE": "21204-21207"}
    assert ucx_variables("192.0.2.1", interface="eth0", ports=None, rdma=("mlx5_0:1",)) == {
        "UCX_NET_DEVICES": "eth0,mlx5_0:1"
    }
    assert ucx_variables("fd00::1", interface="eth0", ports=None) == {
        "UCX_NET_DEVICES": "eth0",
        "UCX_TCP_AF_PRIO": "inet6,inet",
    }


def test_the_interface_of_an_address(address: str) -> None:
    """`interface_of` finds the interface of each address in the kernel's list, secondary addresses included."""
    assert interface_of(LOOPBACK) == "lo"
    assert interface_of(address) in {name for _, name in socket.if_nameindex()} - {"lo"}
    assert interface_of(REMOTE) == ""


def test_a_registry_that_cannot_be_resolved_is_reported() -> None:
    """The error names the registry and its host."""
    with pytest.raises(MeshError, match=r"registry.*nowhere\.invalid"):
        place_service(at("nowhere.invalid:8500"))


async def test_connection_causes_are_short() -> None:
    """A cause contains neither class names nor the address, which the caller's message already has."""
    with closed_port() as port:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError) as caught:
                await session.get(f"http://127.0.0.1:{port}/")
    assert connection_cause(caught.value) == "Connection refused"
    assert connection_cause(TimeoutError(), timeout_s=5.0) == "no answer within 5 s"
    assert connection_cause(TimeoutError()) == "no answer in time"
    assert connection_cause(socket.gaierror(-2, "Name or service not known")) == "Name or service not known"
