"""Real Consul and Prometheus servers on loopback."""

import errno
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.parts import require_part

HOST = "127.0.0.1"
# On two busy cores Consul elects itself leader within 3 s and Prometheus answers within 1 s.
START_S_MAX = 60.0
PORTS = (10_000, 20_000)
_random = Random()
"""Its own generator: hypothesis gives the shared one the same seed in each process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server. The fixture or `with` block that started it owns it."""

    address: str
    """`host:port` of its HTTP API."""
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        """Root of its HTTP API, without a trailing slash."""
        return f"http://{self.address}"


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Returns different free ports of an address. Another process may still take one before the test does.

    They are below the kernel's ephemeral range, so that no outgoing connection takes one.
    """
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            probe, port = stack.enter_context(socket.socket()), _random.randrange(*PORTS)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                found.append(port)
    return found


@contextmanager
def closed_port(host: str = HOST) -> Iterator[int]:
    """Yields a port that refuses connections. No other process can get it meanwhile, but a server of the test can listen on it if it sets
    SO_REUSEADDR, as gRPC's and Python's do."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        # Linux lets several sockets that set this option bind the same port, if none of them listens.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]


def adjacent_free_ports() -> int:
    """Returns the first of two adjacent free ports."""
    for port in free_ports(16):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port + 1))
            return port
    raise AssertionError("no two adjacent ports are free")


@contextmanager
def consul_server(folder: Path, config: Mapping[str, Any] | None = None, *, host: str = HOST) -> Iterator[Server]:
    """Runs a Consul agent in development mode until the block ends. Yields when it has a leader. `config` is added to its configuration.

    It keeps all state in memory and serves HTTP on `host`. It opens only HTTP and the two ports that a server requires.
    """
    binary = require_part("consul")
    [http] = free_ports(1, host)
    server, serf = [each for each in free_ports(3) if each != http][:2]
    unused = dict.fromkeys(("dns", "https", "grpc", "serf_wan"), -1)
    ports = {"http": http, "server": server, "serf_lan": serf, **unused}
    path = folder / f"consul-{http}.json"
    path.write_text(json.dumps({"ports": ports, "disable_update_check": True, **(config or {})}))
    command = [str(binary), "agent", "-dev", f"-bind={HOST}", f"-client={host}", f"-config-file={path}"]
    with running(command, folder / f"consul-{http}.log", f"{host}:{http}", _has_leader) as running_server:
        yield running_server


@contextmanager
def prometheus_server(folder: Path, config: Path) -> Iterator[Server]:
    """Runs a Prometheus with this configuration file. Yields when it answers queries."""
    binary = require_part("prometheus")
    [port] = free_ports(1)
    options = {"config.file": config, "storage.tsdb.path": folder / f"prometheus-{port}"}
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [str(binary), *flags, f"--web.listen-address={HOST}:{port}"]
    with running(command, folder / f"prometheus-{port}.log", f"{HOST}:{port}", _is_ready) as server:
        yield server


@contextmanager
def running(command: list[str], log: Path, address: str, is_up: Callable[[Server], bool]) -> Iterator[Server]:
    """Runs a server and kills it when the block ends, or when the test process dies."""
    # Without setpriv (not on Linux) the servers of a killed test run keep running.
    guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    with log.open("wb") as output:
        process = subprocess.Popen([*guard, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    server = Server(address=address, process=process, log=log)
    try:
        _wait_until_up(server, is_up)
        yield server
    finally:
        process.kill()
        process.wait()


def _wait_until_up(server: Server, is_up: Callable[[Server], bool]) -> None:
    """Polls until the server is up. The error contains the end of the log."""
    end = time.monotonic() + START_S_MAX
    while server.process.poll() is None and time.monotonic() < end:
        if is_up(server):
            return
        time.sleep(0.05)  # The server is another program and has no event to wait for.
    said = "\n".join(server.log.read_text(errors="replace").splitlines()[-15:])
    raise RuntimeError(f"{server.process.args!r} did not come up:\n{said}")


def _has_leader(server: Server) -> bool:
    """Returns whether Consul has a leader and lists its own node. Registrations fail before that."""
    return len(_answer(f"{server.url}/v1/status/leader")) > len('""') and _is_listed(server)


def _is_listed(server: Server) -> bool:
    """Returns whether the catalog has the server's own node. True if Consul demands a token, since then only leadership can be checked."""
    try:
        return _get(f"{server.url}/v1/health/service/consul") != b"[]"
    except urllib.error.HTTPError as error:
        return error.code == 403
    except OSError:
        return False


def _is_ready(server: Server) -> bool:
    """Returns whether Prometheus answers queries."""
    return _answer(f"{server.url}/-/ready") != b""


def _answer(url: str) -> bytes:
    """Returns the body, or nothing if the request fails."""
    try:
        return _get(url)
    except OSError:
        return b""


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=2) as response:
        body: bytes = response.read()
        return body
