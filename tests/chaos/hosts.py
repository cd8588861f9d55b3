"""Hosts of a test mesh: network namespaces with addresses of their own where that is possible, else this machine's loopback."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations

SUBNET = "10.213.71"
"""In the range for private networks. Only the namespaces made here route it."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where a process runs: the words before its command, and its address."""

    name: str
    address: str
    prefix: Sequence[str] = ()


@dataclass(slots=True)
class Hosts:
    """The hosts by name. `has_network` says whether the path between two of them can be cut."""

    hosts: dict[str, Host]
    gateway: str
    """Address at which all hosts reach processes that were started outside of them."""
    has_network: bool
    _cuts: set[tuple[str, str]] = field(default_factory=set)

    def cut(self, first: str, second: str) -> None:
        """Packets between two hosts are dropped from now on; connections stay open."""
        self._route("add", first, second)
        self._cuts.add((first, second))

    def join(self, first: str, second: str) -> None:
        """Ends a cut."""
        self._cuts.discard((first, second))
        self._route("del", first, second)

    def join_all(self) -> None:
        """Ends all cuts."""
        for first, second in list(self._cuts):
            self.join(first, second)

    def _route(self, verb: str, first: str, second: str) -> None:
        for here, there in permutations((self.hosts[first], self.hosts[second])):
            run(*here.prefix, "ip", "route", verb, "blackhole", f"{there.address}/32")


def network_problem() -> str:
    """Why this machine cannot have hosts of its own; empty: it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command ip is missing (Debian package iproute2)"
    name = f"kvm{os.getpid()}t"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode != 0:
        return "this machine does not allow network namespaces"
    run("ip", "netns", "del", name)
    return ""


@contextmanager
def make_hosts(names: Sequence[str], *, with_network: bool) -> Iterator[Hosts]:
    """One host per name, with a network between them or all on loopback."""
    if not with_network:
        yield Hosts({name: Host(name, "127.0.0.1") for name in names}, "127.0.0.1", has_network=False)
        return
    bridge = f"kvb{os.getpid()}"
    spaces: list[str] = []
    hosts: dict[str, Host] = {}
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "addr", "add", f"{SUBNET}.1/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for number, name in enumerate(names, start=2):
            space, outer, inner = (f"kv{letter}{os.getpid()}n{number}" for letter in "soi")
            run("ip", "netns", "add", space)
            spaces.append(space)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
            run("ip", "link", "set", outer, "master", bridge, "up")
            prefix = ("ip", "netns", "exec", space)
            address = f"{SUBNET}.{number}"
            run(*prefix, "ip", "addr", "add", f"{address}/24", "dev", inner)
            run(*prefix, "ip", "link", "set", inner, "up")
            run(*prefix, "ip", "link", "set", "lo", "up")
            hosts[name] = Host(name, address, prefix)
        yield Hosts(hosts, f"{SUBNET}.1", has_network=True)
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def run(*argv: str) -> None:
    """Runs a command; CalledProcessError with its output when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
