"""A small mesh of real processes with identities from a real Consul, with Connect and ACLs that deny by default.

One Consul server; one agent, which the services use and a test may kill; frontend, router, a prefill and a decode worker. Each service uses the
token of its own policy (the prefill worker's is `worker`), created by `kvmesh consul-bootstrap`.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvmesh.discovery.settings import DiscoverySettings
from tests.integration.mesh import worker_metric
from tests.parts import require_part
from tests.patience import PATIENCE_S
from tests.servers import HOST, Server, consul_server, free_ports, running

ROOT = Path(__file__).resolve().parents[1]
ACL = {"enabled": True, "default_policy": "deny"}
CONNECT = {"acl": ACL, "connect": {"enabled": True}}
POLL_S = 0.1
SLOW_STEP = ("--simulated-profile-base-s", "0.05")
"""Makes answers slow, so that they still run while a test changes the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsulAdmin:
    """Calls a Consul that has ACLs with its management token."""

    url: str
    management_token: str = field(repr=False)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Returns the parsed response."""
        return call(self.url, method, path, body, self.management_token)

    def set_intention(self, source: str, destination: str, action: str) -> None:
        """Changes an existing intention."""
        [found] = [
            each
            for each in self.call("GET", "/v1/connect/intentions")
            if (each["SourceName"], each["DestinationName"]) == (source, destination)
        ]
        body = {"SourceName": source, "DestinationName": destination, "SourceType": "consul", "Action": action}
        self.call("PUT", f"/v1/connect/intentions/{found['ID']}", body)

    def rotate_root(self) -> None:
        """Makes Consul create a new root certificate with a new key."""
        found = self.call("GET", "/v1/connect/ca/configuration")
        key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        config = {**found["Config"], "PrivateKey": key.decode(), "RootCert": ""}
        self.call("PUT", "/v1/connect/ca/configuration", {"Provider": "consul", "Config": config})


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuredConsul(ConsulAdmin):
    """A Consul with the policies of the mesh. `credentials` is the folder that `kvmesh consul-bootstrap` wrote."""

    server: Server
    credentials: Path

    def settings(self, name: str, address: str = "") -> DiscoverySettings:
        """Returns the settings of a client that uses the token of policy `name`."""
        return DiscoverySettings(
            address=address or self.server.address, token_file=str(self.credentials / name / "registry-token")
        )


def call(url: str, method: str, path: str, body: Mapping[str, Any] | None = None, token: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, method=method, headers={"X-Consul-Token": token})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        text = response.read()
    return json.loads(text) if text.strip() else None


def bootstrap_command(consul: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvmesh.cli", "consul-bootstrap", str(folder), "--consul", consul]
    command += ["--policies", str(ROOT / "compose" / "consul")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)


@contextmanager
def secured_consul(folder: Path) -> Iterator[SecuredConsul]:
    with consul_server(folder, CONNECT) as server:
        credentials = folder / "credentials"
        done = bootstrap_command(server.address, credentials)
        assert done.returncode == 0, done.stderr
        token = (credentials / "management-token").read_text()
        yield SecuredConsul(url=server.url, management_token=token, server=server, credentials=credentials)


@contextmanager
def consul_agent(folder: Path, consul: SecuredConsul, http: int) -> Iterator[Server]:
    """Runs a client agent of the Consul. It is ready when it has the root certificates."""
    [server_config] = folder.glob("consul-*.json")
    join = json.loads(server_config.read_text())["ports"]["serf_lan"]
    [serf] = free_ports(1)
    token = (consul.credentials / "agent" / "registry-token").read_text()
    config = {
        "node_name": "agent",
        "data_dir": str(folder / "agent-data"),
        "ports": {"http": http, "serf_lan": serf, "dns": -1, "https": -1, "grpc": -1},
        "acl": {**ACL, "tokens": {"agent": token}},
        "retry_join": [f"{HOST}:{join}"],
        "retry_interval": "1s",
        "disable_update_check": True,
    }
    path = folder / "agent.json"
    path.write_text(json.dumps(config))
    command = [str(require_part("consul")), "agent", f"-bind={HOST}", f"-client={HOST}", f"-config-file={path}"]
    with running(command, folder / f"agent-{time.time_ns()}.log", f"{HOST}:{http}", _has_roots) as agent:
        yield agent


def _has_roots(server: Server) -> bool:
    try:
        return bool(call(server.url, "GET", "/v1/agent/connect/ca/roots")["Roots"])
    except (OSError, ValueError, TypeError):
        return False


@dataclass(slots=True, kw_only=True)
class ConnectMesh:
    """The processes of a running mesh."""

    consul: SecuredConsul
    agent: Server
    folder: Path
    agents: ExitStack
    url: str = ""
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, service: str, *flags: str, policy: str = "") -> None:
        """Starts a service. `policy` empty: the policy with the name of the service."""
        credentials = self.consul.credentials / (policy or service)
        command = [sys.executable, "-m", f"services.{service}", "--discovery-address", self.agent.address]
        command += ["--mesh-credentials", str(credentials), "--mesh-identity", "consul", *flags]
        with (self.folder / f"{service}.log").open("ab") as log:
            self.processes[service] = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(self.folder)
            )

    def logs(self) -> str:
        """Returns the end of each service's log, for failure messages."""
        return "\n".join((self.folder / f"{name}.log").read_text()[-3000:] for name in self.processes)

    def command(self, credentials: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """Runs a `kvmesh` command with the credentials of a policy."""
        folder = self.consul.credentials / credentials
        command = [sys.executable, "-m", "kvmesh.cli", *words, "--consul", self.agent.address]
        command += ["--credentials", str(folder), "--mesh-identity", "consul"]
        environment = _environment(self.folder)
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False, env=environment
        )

    def count(self, service: str, event: str) -> int:
        """Returns how often a service has logged an event."""
        return (self.folder / f"{service}.log").read_text().count(event)

    def ask(self, *, words: int = 8, max_tokens: int = 4, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
        """Sends one completion and returns its status and body."""
        body = {"model": "demo", "prompt": " ".join(["word"] * words), "max_tokens": max_tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return int(response.status), response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def stream(self, *, max_tokens: int, on_first: Callable[[str], object]) -> list[str] | None:
        """Streams one completion. Returns its events, or None if it was refused. Calls `on_first` with the first event."""
        body = {"model": "demo", "prompt": "word", "max_tokens": max_tokens, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        events: list[str] = []
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                for line in response:
                    if line.startswith(b"data: "):
                        events.append(line.decode()[6:].strip())
                        if len(events) == 1:
                            on_first(events[0])
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(POLL_S)
            return None
        return events

    def is_decoding(self) -> bool:
        """Whether a request runs on the decode worker."""
        port = self.instances()["decode"]["Meta"]["metrics_port"]
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=PATIENCE_S) as response:
            return worker_metric(response.read().decode(), "kvmesh_worker_running_requests") > 0

    def restart_agent(self, meanwhile: Callable[[], None]) -> None:
        """Kills the agent, calls `meanwhile`, and starts the agent again at the same address."""
        port = int(self.agent.address.rpartition(":")[2])
        self.agents.close()
        meanwhile()
        self.agent = self.agents.enter_context(consul_agent(self.folder, self.consul, port))

    def instances(self) -> dict[str, dict[str, Any]]:
        """Returns the single instance of each service in Consul's catalog."""
        found = {}
        for service in ("frontend", "router", "prefill", "decode"):
            listed = self.consul.call("GET", f"/v1/health/service/kvmesh-{service}")
            if len(listed) == 1:
                found[service] = listed[0]["Service"]
        return found


def _environment(folder: Path) -> dict[str, str]:
    home = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache")}
    return {**os.environ, **home, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def wait_for(condition: Callable[[], object], what: Callable[[], str], timeout_s: float = 2 * PATIENCE_S) -> float:
    """Polls until the condition holds. Returns the time that this took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < timeout_s, what()
        time.sleep(POLL_S)
    return time.monotonic() - began_s


@contextmanager
def connect_mesh(folder: Path) -> Iterator[ConnectMesh]:
    """Runs a mesh that is ready to answer and uses both workers."""
    with secured_consul(folder) as consul, ExitStack() as agents:
        [http, port] = free_ports(2)
        agent = agents.enter_context(consul_agent(folder, consul, http))
        mesh = ConnectMesh(consul=consul, agent=agent, folder=folder, agents=agents, url=f"http://{HOST}:{port}")
        try:
            mesh.start("router")
            engine = ("--engine", "simulated", "--model", str(ROOT / "models" / "demo"), *SLOW_STEP)
            mesh.start("prefill", *engine, policy="worker")
            mesh.start("decode", *engine)
            mesh.start("frontend", "--http-port", str(port))
            wait_for(lambda: len(mesh.instances()) == 4, mesh.logs)
            wait_for(lambda: mesh.ask()[0] == 200, mesh.logs)
            yield mesh
        finally:
            _stop(mesh)


def _stop(mesh: ConnectMesh) -> None:
    for process in mesh.processes.values():
        process.send_signal(signal.SIGTERM)
    for process in mesh.processes.values():
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        process.kill()
        process.wait()
