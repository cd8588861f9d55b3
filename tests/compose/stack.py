"""The stack of compose/compose.yaml with replacements for the public images, on separate ports."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from tests.compose.daemon import BASE_IMAGE, FOLDER, Docker, make_base_image
from tests.parts import ROOT, require_part
from tests.patience import PATIENCE_S

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PUBLISHED = ("KVMESH", "PROMETHEUS", "CONSUL", "COLLECTOR")
FRONTENDS = 2
SERVICES = ("frontend", "router", "planner", "prefill", "decode")
"""The mesh's services that register with Consul."""
PIP_KEYS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout")
WAIT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running stack. `ports` has the ports of the published services, by the prefix of their variable."""

    docker: Docker
    name: str
    files: Sequence[Path]
    environment: Mapping[str, str]
    ports: Mapping[str, int]

    def compose(self, *command: str, check: bool = True, **variables: str) -> str:
        """Runs `docker compose COMMAND`."""
        files = [word for path in self.files for word in ("-f", str(path))]
        return self.docker.run(
            "compose", "-p", self.name, *files, *command, check=check, **{**self.environment, **variables}
        )

    def containers(self, service: str, *, all_: bool = False) -> list[str]:
        """Returns the ids of a service's containers, the oldest first. `all_` includes containers that have ended."""
        labels = (f"project={self.name}", f"service={service}")
        filters = [word for each in labels for word in ("--filter", f"label=com.docker.compose.{each}")]
        ids = self.docker.run("ps", "--quiet", "--no-trunc", *(["--all"] if all_ else []), *filters).split()
        return ids[::-1]

    def host_name(self, container: str) -> str:
        """Returns a container's host name, which is a part of the ids of its services."""
        return self.docker.run("inspect", "--format", "{{.Config.Hostname}}", container).strip()

    def address(self, container: str, network: str = "default") -> str:
        """Returns a container's address on a network of the stack."""
        wanted = f'{{{{(index .NetworkSettings.Networks "{self.name}_{network}").IPAddress}}}}'
        return self.docker.run("inspect", "--format", wanted, container).strip()

    def url(self, what: str, path: str = "") -> str:
        """Returns a URL of a published service."""
        return f"http://127.0.0.1:{self.ports[what]}{path}"

    @property
    def frontends(self) -> Sequence[str]:
        """The addresses of the two frontends."""
        return [f"http://127.0.0.1:{self.ports['KVMESH'] + number}" for number in range(FRONTENDS)]

    def management_token(self) -> str:
        """Returns Consul's management token, as docs/deploy/compose.md describes."""
        show = ("--entrypoint", "cat", "credentials", "/credentials/management-token")
        return self.compose("run", "--rm", "--no-deps", "--no-TTY", *show).strip()

    def query(self, promql: str) -> list[Any]:
        """Returns the result of an instant query to the stack's Prometheus."""
        result: list[Any] = get_json(self.url("PROMETHEUS", f"/api/v1/query?query={quote(promql)}"))["data"]["result"]
        return result

    def logs(self) -> str:
        """Returns the end of every log, for a failure message."""
        return self.compose("logs", "--no-color", "--tail", "15", check=False)[-12000:]


def get_json(url: str, headers: Mapping[str, str] | None = None) -> Any:
    """Sends a GET request and parses the JSON body."""
    with urllib.request.urlopen(
        urllib.request.Request(url, headers=dict(headers or {})), timeout=PATIENCE_S
    ) as response:
        return json.load(response)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Polls until the condition is true and returns its value. An HTTP error counts as false."""
    deadline = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except (OSError, urllib.error.URLError) as error:
            last = error
        time.sleep(0.5)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what} ({last})")


@contextmanager
def running_stack(docker: Docker, *overlays: Path, name: str, **variables: str) -> Iterator[Stack]:
    """Builds and starts a stack and waits until it is healthy. Takes it down with its volumes on exit."""
    make_base_image(docker)
    stack = make_stack(docker, *overlays, name=name, **variables)
    try:
        stack.compose("build", "--quiet")
        try:
            stack.compose("up", "--detach", "--wait", "--wait-timeout", "400")
        except AssertionError as error:
            states = stack.compose("ps", "--all", check=False)
            raise AssertionError(f"{error}\n{states}\n{stack.logs()}") from None
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "10", check=False)


def make_stack(docker: Docker, *overlays: Path, name: str, **variables: str) -> Stack:
    """Chooses ports and writes files that builds need."""
    ports = dict(zip(PUBLISHED, unused_ports(len(PUBLISHED)), strict=True))
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings = FOLDER / "pip.conf"
    settings.write_text(pip_settings())
    last = ports["KVMESH"] + FRONTENDS - 1
    environment = {
        **{f"{what}_PUBLISH": f"127.0.0.1:{port}" for what, port in ports.items()},
        "KVMESH_PUBLISH": f"127.0.0.1:{ports['KVMESH']}-{last}",
        "KVMESH_FRONTENDS": str(FRONTENDS),
        "BASE_IMAGE": BASE_IMAGE,
        "KVMESH_TAG": "test",
        "KVMESH_BUILD_NETWORK": "host",
        "KVMESH_PIP_CONF": str(settings),
        "KVMESH_CA_BUNDLE": str(CERTIFICATES) if CERTIFICATES.exists() else "/dev/null",
        "KVMESH_TEST_ROOT": str(ROOT),
        "KVMESH_TEST_CONSUL": str(require_part("consul").parent),
        "KVMESH_TEST_PROMETHEUS": str(require_part("prometheus").parent),
        **variables,
    }
    files = [ROOT / "compose" / "compose.yaml", ROOT / "tests" / "compose" / "overlay.yaml", *overlays]
    return Stack(docker=docker, name=name, files=files, environment=environment, ports=ports)


def unused_ports(count: int) -> list[int]:
    """Returns free ports below the kernel's ephemeral range, because containers start later, and again after `down`.

    Each is the first of FRONTENDS consecutive free ports.
    """
    candidates = Random(os.getpid()).sample(range(10000, 30000, FRONTENDS), 1000)
    free = (port for port in candidates if all(is_unused(port + number) for number in range(FRONTENDS)))
    return list(islice(free, count))


def is_unused(port: int) -> bool:
    """Returns whether nothing listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def pip_settings() -> str:
    """Returns this machine's pip settings without those that name local files, which do not exist in a build."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    lines = ["[global]"]
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        words = [word for word in value.strip("'\"").split() if not word.startswith(("/", "file:"))]
        if key.rpartition(".")[2] in PIP_KEYS and words:
            lines.append(f"{key.rpartition('.')[2]} = {' '.join(words)}")
    return "\n".join(lines) + "\n"
