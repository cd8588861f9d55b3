"""Hosts of a test mesh: network namespaces with addresses of their own where that is possible, else this machine's loopback."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations

SUBNET = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
"""Addresses for private networks, four to a link. They are reachable on this machine only."""


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
    outside: str
    """Address at which all hosts reach processes of this machine that run on none of them."""
    has_network: bool
    router: Sequence[str] = ()
    """The words before a command on the router between the hosts."""
    _cuts: set[tuple[str, str]] = field(default_factory=set)

    def cut(self, first: str, second: str) -> None:
        """Packets between two hosts are lost from now on; connections stay open."""
        self._rule("add", first, second)
        self._cuts.add((first, second))

    def join(self, first: str, second: str) -> None:
        """Ends a cut."""
        self._cuts.discard((first, second))
        self._rule("del", first, second)

    def join_all(self) -> None:
        """Ends all cuts."""
        for first, second in list(self._cuts):
            self.join(first, second)

    def _rule(self, verb: str, first: str, second: str) -> None:
        for here, there in permutations((self.hosts[first].address, self.hosts[second].address)):
            run(*self.router, "ip", "rule", verb, "from", here, "to", there, "blackhole")


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
    spaces: list[str] = []
    hosts: dict[str, Host] = {}
    try:
        router = _add_space("r", spaces)
        run(*router, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
        outside = _link(router, (), 0)
        for number, name in enumerate(names, start=1):
            prefix = _add_space(str(number), spaces)
            hosts[name] = Host(name, _link(router, prefix, number), prefix)
        yield Hosts(hosts, outside, has_network=True, router=router)
    finally:
        for space in spaces:  # Their devices go with them, also the one in this machine's own namespace.
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _add_space(name: str, spaces: list[str]) -> Sequence[str]:
    """A network namespace; the words before a command in it."""
    space = f"kv{os.getpid()}{name}"
    run("ip", "netns", "add", space)
    spaces.append(space)
    prefix = ("ip", "netns", "exec", space)
    run(*prefix, "ip", "link", "set", "lo", "up")
    return prefix


def _link(router: Sequence[str], host: Sequence[str], number: int) -> str:
    """Connects a host to the router; the host's address. No words before its commands: this machine itself."""
    theirs, ours = f"{SUBNET}.{4 * number + 1}", f"{SUBNET}.{4 * number + 2}"
    outer, inner = f"kvr{os.getpid()}n{number}", f"kvh{os.getpid()}n{number}"
    run(*router, "ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", host[-1] if host else "1")
    run(*router, "ip", "addr", "add", f"{theirs}/30", "dev", outer)
    run(*router, "ip", "link", "set", outer, "up")
    run(*host, "ip", "addr", "add", f"{ours}/30", "dev", inner)
    run(*host, "ip", "link", "set", inner, "up")
    run(*host, "ip", "route", "add", f"{SUBNET}.0/24", "via", theirs)
    return ours


def run(*argv: str) -> None:
    """Runs a command; CalledProcessError with its output when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
