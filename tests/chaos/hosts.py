"""Hosts of a test mesh: network namespaces with separate addresses if this machine allows them, otherwise its loopback."""

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory

SUBNET = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
"""Addresses for private networks, four per link. They are reachable on this machine only."""
SUBNET_V6 = f"fd9e:{os.getpid() >> 16:x}:{os.getpid() & 0xFFFF:x}"
"""Prefix of the IPv6 addresses, a /64 per link."""
OWN_MACHINE = (
    'mount -t tmpfs -o size=64m tmpfs /dev/shm && mount --bind $0 /proc/sys/kernel/random/boot_id && exec "$@"'
)
"""Gives a host's processes separate shared memory and a separate boot id, by which UCX identifies machines."""

ROUTES = (
    "cd /proc/sys/net && echo 1 | tee ipv4/ip_forward ipv6/conf/all/forwarding && echo 0 | tee ipv4/conf/*/rp_filter"
)
"""Forwards packets, including those that arrive on another device than an answer would use."""


@dataclass(frozen=True, slots=True)
class Host:
    """A place to run processes: its address and the prefix of its commands."""

    name: str
    address: str
    prefix: Sequence[str] = ()
    space: str = ""
    """Name of its network namespace. Empty: this machine's own."""

    def at(self, port: int) -> str:
        """Returns `host:port`, with brackets around an IPv6 address."""
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"

    def kill_all(self) -> None:
        """Sends SIGKILL to all processes of the host."""
        found = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@dataclass(slots=True)
class Hosts:
    """The hosts by name. `has_network` is True if paths between them can be cut."""

    hosts: dict[str, Host]
    outside: str
    """Address at which all hosts reach processes of this machine that run outside them."""
    has_network: bool
    router: Sequence[str] = ()
    """Prefix of commands on the router between the hosts."""
    version: int = 4
    """IP version."""
    _cuts: set[tuple[str, str]] = field(default_factory=set)

    def cut(self, first: str, second: str) -> None:
        """Drops packets between two hosts from now on; connections stay open. With `all` as the second host, drops all packets of the first."""
        self._rules("add", first, second)
        self._cuts.add((first, second))

    def join(self, first: str, second: str) -> None:
        """Ends a cut."""
        self._cuts.discard((first, second))
        self._rules("del", first, second)

    def join_all(self) -> None:
        """Ends all cuts."""
        for first, second in list(self._cuts):
            self.join(first, second)

    def power_off(self, name: str) -> None:
        """Cuts off the host and kills its processes. `join(name, "all")` connects it again."""
        self.cut(name, "all")
        self.hosts[name].kill_all()

    def rule(self, verb: str, *words: str) -> None:
        """Adds or deletes a routing rule of the router."""
        run(*self.router, "ip", f"-{self.version}", "rule", verb, *words)

    def _rules(self, verb: str, first: str, second: str) -> None:
        ends = self.hosts[first].address, self.hosts[second].address if second in self.hosts else second
        for here, there in permutations(ends):
            self.rule(verb, "from", here, "to", there, "blackhole")


def network_problem() -> str:
    """Returns why this machine cannot have separate hosts; empty if it can."""
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
def make_hosts(names: Sequence[str], *, with_network: bool, version: int = 4) -> Iterator[Hosts]:
    """Creates one host per name, either in a network of this IP version or all on loopback. Removes the hosts on exit."""
    if not with_network:
        yield Hosts({name: Host(name, "127.0.0.1") for name in names}, "127.0.0.1", has_network=False)
        return
    spaces: list[str] = []
    hosts: dict[str, Host] = {}
    try:
        with TemporaryDirectory(prefix="kvmesh-hosts-") as directory:
            router = add_space("r", spaces)
            run(*router, "sh", "-c", ROUTES)
            outside = _link(router, (), 0, version)
            for number, name in enumerate(names, start=1):
                space = add_space(str(number), spaces)
                address = _link(router, space, number, version)
                boot_id = Path(directory) / name
                boot_id.write_text(f"{uuid.uuid4()}\n")
                alone = ("unshare", "--ipc", "--mount", "sh", "-c", OWN_MACHINE, str(boot_id))
                hosts[name] = Host(name=name, address=address, prefix=(*space, *alone), space=space[-1])
            yield Hosts(hosts, outside, has_network=True, router=router, version=version)
    finally:
        for host in hosts.values():
            host.kill_all()
        delete_spaces(spaces)


def delete_spaces(spaces: Sequence[str]) -> None:
    """Deletes namespaces with their devices, including the peers of these devices in other namespaces."""
    for each in spaces:
        subprocess.run(["ip", "netns", "del", each], capture_output=True, check=False)


def add_space(name: str, spaces: list[str]) -> Sequence[str]:
    """Creates a network namespace. Returns the prefix of commands in it."""
    space = f"kv{os.getpid()}{name}"
    run("ip", "netns", "add", space)
    spaces.append(space)
    prefix = ("ip", "netns", "exec", space)
    run(*prefix, "ip", "link", "set", "lo", "up")
    return prefix


def _link(router: Sequence[str], host: Sequence[str], number: int, version: int) -> str:
    """Connects a host to the router. Returns the host's address. Without a command prefix, the host is this machine."""
    if version == 4:
        theirs, ours, bits = f"{SUBNET}.{4 * number + 1}", f"{SUBNET}.{4 * number + 2}", ("/30",)
        everyone = f"{SUBNET}.0/24"
    else:
        theirs, ours, bits = f"{SUBNET_V6}:{number}::1", f"{SUBNET_V6}:{number}::2", ("/64", "nodad")
        everyone = f"{SUBNET_V6}::/48"
    outer, inner = f"kvr{os.getpid()}n{number}", f"kvh{os.getpid()}n{number}"
    run(*router, "ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", host[-1] if host else "1")
    for place, device, address in ((router, outer, theirs), (host, inner, ours)):
        run(*place, "ip", "addr", "add", address + bits[0], "dev", device, *bits[1:])
        run(*place, "ip", "link", "set", device, "up")
    run(*host, "ip", "route", "add", everyone, "via", theirs)
    return ours


def run(*argv: str) -> None:
    """Runs a command. Raises RuntimeError with its error output if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
