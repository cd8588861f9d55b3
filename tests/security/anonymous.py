"""Tries every port of a new mesh as another user of the machine: without a token, a certificate or a key.

python -m tests.security.anonymous               starts a mesh of simulated engines, prints what each port answers, and stops the mesh
"""

import asyncio
import ipaddress
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import grpc
import grpc.aio

from bench.table import render
from kvmesh.discovery.base import FRONTEND, SERVICES
from kvmesh.identity.permissions import PERMISSIONS
from tests.integration.mesh import RunningMesh, argv_simulated, descendants, running_mesh
from tests.patience import PATIENCE_S

PRIVATE_TIMEOUT_S = 5.0
"""For ports that the registry does not list, which need not answer. A listed port that is slow has until PATIENCE_S."""
METHODS = (
    *PERMISSIONS,
    "/grpc.channelz.v1.Channelz/GetServers",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)
PATHS = (
    "/metrics",
    "/health",
    "/live",
    "/v1/models",
    "/v1/agent/services",
    "/v1/kv/?recurse",
    "/v1/health/service/kvmesh-decode",
)
PUBLIC_METHODS = ("/grpc.health.v1.", "/grpc.reflection.")
LISTENING = "0A"
HEALTH_PATHS = {"/metrics", "/health", "/live"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A listening TCP port and its answers without credentials: the statuses of HTTP paths, and the gRPC methods that are not refused."""

    pid: int
    host: str
    port: int
    what: str
    paths: dict[str, int]
    methods: tuple[str, ...]

    @property
    def problem(self) -> str:
        """Describes what the port exposes beyond the public API, health and metrics; empty if nothing."""
        if not ipaddress.ip_address(self.host).is_loopback:
            return f"listens on {self.host}"
        answered = {path for path, status in self.paths.items() if status not in (403, 404)}
        methods = {each for each in self.methods if not each.startswith(PUBLIC_METHODS)}
        if self.what == "public HTTP":
            return "" if answered <= {*HEALTH_PATHS, "/v1/models"} else str(answered)
        if self.what == "public gRPC":
            return str(methods) if methods else ""
        if self.what == "metrics":
            return str(answered) if answered != HEALTH_PATHS or self.methods else ""
        return str((answered, self.methods)) if answered or self.methods else ""


def listening(pids: Sequence[int]) -> Iterator[tuple[int, str, int]]:
    """Yields process, address and port of every listening TCP socket of these processes."""
    sockets = {}
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING:
                sockets[words[9]] = words[1]
    seen = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(link.readlink())
            except OSError:
                continue
            inode = target.removeprefix("socket:[").rstrip("]")
            if target.startswith("socket:[") and inode in sockets and inode not in seen:
                seen.add(inode)
                address, _, port = sockets[inode].partition(":")
                yield pid, _host(address), int(port, 16)


def _host(text: str) -> str:
    """Parses an address of /proc/net/tcp, whose 32-bit words are in the machine's byte order."""
    words = bytes.fromhex(text)
    address = ipaddress.ip_address(b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4)))
    return str(getattr(address, "ipv4_mapped", None) or address)


async def try_ports(mesh: RunningMesh) -> list[Port]:
    """Returns all listening ports of the mesh with their answers without credentials."""
    names = await _names(mesh)
    found = await _sockets(mesh)
    return [
        Port(
            pid=pid,
            host=host,
            port=port,
            what=names.get(port, "private"),
            paths=await _http(host, port, timeout_s=PATIENCE_S if port in names else PRIVATE_TIMEOUT_S),
            methods=await _grpc(host, port, timeout_s=PATIENCE_S if port in names else PRIVATE_TIMEOUT_S),
        )
        for pid, host, port in found
    ]


async def kinds_of_ports(mesh: RunningMesh) -> Counter[str]:
    """Counts the listening ports by kind."""
    names = await _names(mesh)
    return Counter(names.get(port, "private") for _, _, port in await _sockets(mesh))


async def _sockets(mesh: RunningMesh) -> list[tuple[int, str, int]]:
    pids = (mesh.process.pid, *descendants(mesh.process.pid))
    return await asyncio.to_thread(lambda: list(listening(pids)))


async def _names(mesh: RunningMesh) -> dict[int, str]:
    """Returns the kind of each port that the registry lists."""
    registry = mesh.target.registry()
    names = {urlsplit(mesh.url).port or 0: "public HTTP", urlsplit(mesh.registry).port or 0: "registry"}
    try:
        for service in SERVICES:
            for instance in (await registry.instances(service)).instances:
                names[int(instance.meta["metrics_port"])] = "metrics"
                names[instance.port] = "public gRPC" if service == FRONTEND else "gRPC"
    finally:
        await registry.aclose()
    return names


async def _http(host: str, port: int, *, timeout_s: float) -> dict[str, int]:
    """Returns the statuses of the paths that answer."""
    found = {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for path in PATHS:
            try:
                async with session.get(f"http://{host}:{port}{path}") as response:
                    found[path] = response.status
            except (aiohttp.ClientError, TimeoutError):
                return found  # The port speaks another protocol.
    return found


async def _grpc(host: str, port: int, *, timeout_s: float) -> tuple[str, ...]:
    """Returns the methods that exist and do not refuse the call. A port without plain-text gRPC has none."""
    refusals = (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAUTHENTICATED,
    )
    found = []
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        for method in METHODS:
            code = await channel.unary_unary(method)(b"", timeout=timeout_s).code()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return tuple(found)
            if code not in refusals:
                found.append(method)
    return tuple(found)


async def _main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        async with running_mesh(Path(folder), *argv_simulated("--no-gateway")) as mesh:
            ports = await try_ports(mesh)
    rows = [
        (
            f"{each.host}:{each.port}",
            each.what,
            " ".join(path for path, status in each.paths.items() if status == 200) or "-",
            str(len(each.methods)),
            each.problem or "closed",
        )
        for each in ports
    ]
    print(render(("port", "what", "HTTP 200", "gRPC methods", "finding"), rows))
    return 1 if any(each.problem for each in ports) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
