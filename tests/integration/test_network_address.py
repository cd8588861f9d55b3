"""Services of a mesh on a host with its own address, with a real Consul on that address."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvmesh.discovery.base import SERVICES, Instance
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.settings import DiscoverySettings
from tests.integration.mesh import ROOT, RunningMesh, argv_simulated, running_mesh, wait_until
from tests.own_address import own_address
from tests.patience import PATIENCE_S
from tests.servers import Server, consul_server

FIRST, LAST = 22_000, 22_059
LISTENING = "0A"


@pytest.fixture
def address() -> Iterator[str]:
    with own_address() as found:
        yield found


@pytest.fixture
def consul(address: str, tmp_path: Path) -> Iterator[Server]:
    with consul_server(tmp_path, host=address) as server:
        yield server


async def instances(consul: Server) -> list[Instance]:
    registry = ConsulRegistry(DiscoverySettings(address=consul.address))
    try:
        return [each for service in SERVICES for each in (await registry.instances(service)).instances]
    finally:
        await registry.aclose()


def listening_ports(pids: list[int]) -> set[tuple[str, int]]:
    """Returns address (in the kernel's format) and port of each TCP socket on which these processes listen."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = {line.split()[9]: line.split()[1] for table in tables for line in table if line.split()[3] == LISTENING}
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(link.readlink())
            except FileNotFoundError:
                continue  # Closed since the listing.
            inode = re.fullmatch(r"socket:\[(\d+)\]", target)
            if inode and inode[1] in sockets:
                host, _, port = sockets[inode[1]].rpartition(":")
                found.add((host, int(port, 16)))
    return found


async def test_a_mesh_at_a_remote_registry_is_reachable(address: str, consul: Server, tmp_path: Path) -> None:
    """Without a flag, all services listen on the host's address and register it. The ports are in the configured range, UCX's too."""
    flags = argv_simulated("--consul", consul.address, "--port-range", f"{FIRST}-{LAST}", "--greeting", "")
    async with running_mesh(tmp_path, *flags) as mesh:
        assert mesh.url.startswith(f"http://{address}:")
        assert any(
            f"services listen on {address}: it reaches the registry at {address}" in line for line in mesh.output
        )
        found = await instances(consul)
        assert {each.service for each in found} == set(SERVICES)
        assert {each.host for each in found} == {address}
        middle = (FIRST + LAST + 1) // 2
        for each in found:
            assert FIRST <= each.port < middle
            assert FIRST <= int(each.meta["metrics_port"]) < middle
        workers = [*mesh.pids("prefill"), *mesh.pids("decode")]

        def ucx_listens() -> bool:
            return sum(port >= middle for _, port in listening_ports(workers)) == len(workers)

        await wait_until(ucx_listens, PATIENCE_S, "UCX listens once per worker")
        open_ports = listening_ports(workers)
        # gRPC listens on the IPv4 address mapped to IPv6.
        assert all(host.endswith(kernel_form(address)) for host, _ in open_ports), open_ports
        assert all(FIRST <= port <= LAST for _, port in open_ports)
        body = {"model": "demo", "prompt": " ".join(["word"] * 200), "max_tokens": 4}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{mesh.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
        await check_by_doctor(mesh.flags)
        await add_prefill_worker(mesh, consul, tmp_path)
        decode = mesh.pids("decode")[0]
        os.kill(decode, signal.SIGSTOP)
        try:
            status, output = await doctor(mesh.flags)
            assert status == 1, output
            assert "does not answer" in output
        finally:
            os.kill(decode, signal.SIGCONT)


async def test_a_prefill_worker_warns_that_its_kv_is_unreachable(consul: Server, tmp_path: Path) -> None:
    """UCX does not use the interface with the worker's address. The worker logs that before it registers, and without a peer."""
    log = tmp_path / "prefill.log"
    argv = ("--discovery-address", consul.address, "--engine", "simulated", "--model", str(ROOT / "models" / "demo"))
    async with running_worker(log, *argv, "--insecure-listen", UCX_NET_DEVICES="lo") as worker:
        await wait_registered(worker, consul, count=1)
        found = [line for line in log.read_text().splitlines() if "kv_source_unreachable" in line]
        assert len(found) == 1 and "UCX_NET_DEVICES" in found[0], log.read_text()


async def test_a_worker_without_a_usable_device_names_the_variable(consul: Server) -> None:
    """If UCX's device does not exist, the worker exits with an error that names the variable."""
    argv = ("--discovery-address", consul.address, "--engine", "simulated", "--model", str(ROOT / "models" / "demo"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.prefill", *argv, "--insecure-listen"),
        cwd=ROOT,
        env={**os.environ, "UCX_NET_DEVICES": "no-such-device"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode  # Not always 1: NIXL 1.5 crashes when a process ends after that.
    assert "UCX_NET_DEVICES=no-such-device" in output.decode()


async def add_prefill_worker(mesh: RunningMesh, consul: Server, tmp_path: Path) -> None:
    """Starts another prefill worker, as on a host that joins. Before it registers, the mesh's decode worker pulls from it, with mesh TLS."""
    log = tmp_path / "joins.log"
    argv = ("--engine", "simulated", "--model", str(ROOT / "models" / "demo"), *mesh.service_flags)

    async def has_checked_its_handoff() -> bool:
        async with running_worker(log, *argv) as worker:
            await wait_registered(worker, consul, count=len(await instances(consul)) + 1)
            return "kv_path_checked" in log.read_text() and '"warning"' not in log.read_text()

    # A worker warns and registers if the check takes seconds, as it may on a busy machine.
    await wait_until(has_checked_its_handoff, 2 * PATIENCE_S, log.read_text)


@asynccontextmanager
async def running_worker(log: Path, *argv: str, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.prefill", *argv),
            cwd=ROOT,
            env={**os.environ, **env},
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE_S)


async def wait_registered(worker: asyncio.subprocess.Process, consul: Server, *, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(await instances(consul)) < count:
            assert worker.returncode is None
            await asyncio.sleep(0.05)


async def doctor(flags: Sequence[str]) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", "doctor", *flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return process.returncode, output.decode()


async def check_by_doctor(flags: Sequence[str]) -> None:
    """Runs the doctor until each of its checks passes. A busy machine may delay a heartbeat, an answer or a record with a worker's time."""
    checks = ("services", "addresses", "ports", "clocks", "versions", "fingerprints", "side channels")
    lines = [*(rf"^ *\d+ {check} +ok " for check in checks), r"KV transfer +\w+ +prefill-\S+ -> decode-\S+:"]
    output = ""

    async def has_no_complaint() -> bool:
        nonlocal output
        status, output = await doctor(flags)
        return status == 0 and all(re.search(line, output, re.MULTILINE) for line in lines)

    await wait_until(has_no_complaint, 2 * PATIENCE_S, lambda: output)


def kernel_form(address: str) -> str:
    return bytes(reversed([int(part) for part in address.split(".")])).hex().upper()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--rpc-host", "127.0.0.1"), "would register 127.0.0.1"),
        (("--rpc-host", "0.0.0.0"), "--rpc-advertise-host"),
        (("--address", "192.0.2.77"), "not an address of this machine"),
    ],
)
async def test_addresses_that_peers_cannot_use_are_refused(consul: Server, flags: tuple[str, ...], reason: str) -> None:
    """The service exits with an error that names the flag, and registers nothing."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.router", "--discovery-address", consul.address, *flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 1
    assert reason in output.decode()
    assert "--address" in output.decode()
    assert await instances(consul) == []
