"""Real Consul and Prometheus servers on loopback, for as long as a test needs them."""

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
from typing import Any

from tests.parts import require_part

HOST = "127.0.0.1"
# On two busy cores Consul elects itself leader within 3 s and Prometheus answers within 1 s.
START_S_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server; it belongs to the fixture or `with` block that started it."""

    address: str
    """`host:port` of its HTTP API."""
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        """Root of its HTTP API, without a slash at the end."""
        return f"http://{self.address}"


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Ports of an address, all different, that nothing listened on a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


def adjacent_free_ports() -> int:
    """The first of two."""
    for port in free_ports(16):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port + 1))
            return port
    raise AssertionError("no two adjacent ports are free")


@contextmanager
def consul_server(folder: Path, config: Mapping[str, Any] | None = None, *, host: str = HOST) -> Iterator[Server]:
    """A Consul agent in development mode that has elected itself leader; `config` is added to its configuration.

    It keeps all state in memory and serves HTTP on `host`. Only HTTP and the two ports that a server cannot do without are open.
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
    """A Prometheus with this configuration file, ready to answer queries."""
    binary = require_part("prometheus")
    [port] = free_ports(1)
    options = {"config.file": config, "storage.tsdb.path": folder / f"prometheus-{port}"}
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [str(binary), *flags, f"--web.listen-address={HOST}:{port}"]
    with running(command, folder / f"prometheus-{port}.log", f"{HOST}:{port}", _is_ready) as server:
        yield server


@contextmanager
def running(command: list[str], log: Path, address: str, is_up: Callable[[Server], bool]) -> Iterator[Server]:
    """Run a server until the block ends; it is killed then, and also when the tests' process dies."""
    # Without setpriv (not on Linux) a killed test run leaves its servers behind.
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
    """Ask again and again; the log's end is the error when it does not come up."""
    end = time.monotonic() + START_S_MAX
    while server.process.poll() is None and time.monotonic() < end:
        if is_up(server):
            return
        time.sleep(0.05)  # A foreign process: there is nothing to wait on but its answer.
    said = "\n".join(server.log.read_text(errors="replace").splitlines()[-15:])
    raise RuntimeError(f"{server.process.args!r} did not come up:\n{said}")


def _has_leader(server: Server) -> bool:
    """Whether Consul has a leader and knows itself as a node, without which registrations fail."""
    return len(_answer(f"{server.url}/v1/status/leader")) > len('""') and _is_listed(server)


def _is_listed(server: Server) -> bool:
    """Whether the catalog has the server's own node; one that demands tokens does not say, and leadership is enough."""
    try:
        return _get(f"{server.url}/v1/health/service/consul") != b"[]"
    except urllib.error.HTTPError as error:
        return error.code == 403
    except OSError:
        return False


def _is_ready(server: Server) -> bool:
    """Whether Prometheus answers queries."""
    return _answer(f"{server.url}/-/ready") != b""


def _answer(url: str) -> bytes:
    """The body, or nothing where there is no good answer yet."""
    try:
        return _get(url)
    except OSError:
        return b""


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=2) as response:
        body: bytes = response.read()
        return body
