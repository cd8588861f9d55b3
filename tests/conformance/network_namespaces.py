"""Two hosts in network namespaces of this machine, connected by a switch that a test can turn off."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

HOSTS = (1, 2)


def run(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@dataclass(frozen=True)
class Hosts:
    """Host `n` has the address `address(n)`. All names contain the process id, so that test runs do not disturb each other."""

    name: str

    def namespace(self, number: int) -> str:
        return f"{self.name}-{number}"

    def address(self, number: int) -> str:
        return f"10.91.0.{number}"

    def command(self, number: int, *command: str) -> Sequence[str]:
        """Returns the command that runs this command on a host."""
        return ("ip", "netns", "exec", self.namespace(number), *command)

    def set_link(self, is_up: bool) -> None:
        """Turns the switch on or off. The hosts' own interfaces stay up, as when a remote cable is cut."""
        run("-n", f"{self.name}-s", "link", "set", "switch", "up" if is_up else "down")


@contextmanager
def network_hosts() -> Iterator[Hosts]:
    """Skips the test if namespaces cannot be created."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    hosts = Hosts(f"kvmesh-{os.getpid()}")
    try:
        try:
            run("netns", "add", f"{hosts.name}-s")
            run("-n", f"{hosts.name}-s", "link", "add", "switch", "type", "bridge")
            for number in HOSTS:
                _connect(hosts, number)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made: {error.stderr.decode().strip()}")
        hosts.set_link(True)
        yield hosts
    finally:
        for name in ("s", *HOSTS):
            subprocess.run(["ip", "netns", "del", f"{hosts.name}-{name}"], check=False, capture_output=True, timeout=10)


def _connect(hosts: Hosts, number: int) -> None:
    switch, host = f"{hosts.name}-s", hosts.namespace(number)
    run("netns", "add", host)
    run("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", f"port{number}", "netns", switch)
    run("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
    run("-n", host, "addr", "add", f"{hosts.address(number)}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        run("-n", host, "link", "set", device, "up")
