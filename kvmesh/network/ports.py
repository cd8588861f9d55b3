"""Ports of a fixed range, for machines behind firewalls."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from kvmesh.errors import UnavailableError
from kvmesh.network.hosts import family
from kvmesh.network.names import host_port

PORTS_MIN = 8
UCX_PORTS = 2
"""Ports of UCX per agent and interface: one, plus a spare one. UCX retries forever if its range has no free port."""
PORTS_TRIED = 64
_claims: list[socket.socket] = []
"""Claims of this process. They end with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRange:
    """Ports `first` to `last`. Services take theirs from the first half. UCX draws its own from the second half at random."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "PortRange":
        """FIRST-LAST. ValueError otherwise."""
        first, dash, last = text.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= 65_535):
            raise ValueError(f"port_range: {text!r} is not FIRST-LAST, two ports of 1 to 65535")
        if int(last) - int(first) + 1 < PORTS_MIN:
            raise ValueError(f"port_range: {text} has fewer than {PORTS_MIN} ports; a worker alone takes four")
        return cls(first=int(first), last=int(last))

    @property
    def _middle(self) -> int:
        return (self.first + self.last + 1) // 2

    @property
    def ucx(self) -> str:
        """The second half, as UCX writes ranges."""
        return f"{self._middle}-{self.last}"

    def claim(self, host: str) -> int:
        """Returns a free port of the first half, which no other service of this machine takes while this process lives.

        UnavailableError when there is none.
        """
        for port in range(self.first, self._middle):
            if _claim(host, port):
                return port
        raise self._full(f"{self.first}-{self._middle - 1}", host=host)

    def check_ucx(self, host: str) -> None:
        """UnavailableError when UCX would find no port."""
        free = sum(_is_free(host, port) for port in range(self._middle, self.last + 1))
        if free < UCX_PORTS:
            raise self._full(self.ucx, host=host)

    def _full(self, half: str, host: str) -> UnavailableError:
        message = f"no port of {half} is free on {host}: services of this host share --port-range {self.first}-{self.last}; widen it"
        return UnavailableError(message, reason="no_free_port", field="port_range")


def _claim(host: str, port: int) -> bool:
    """Claims a port by an abstract Unix socket of its name (Linux), which is free again when the process ends.

    So that a port stays ours between the choice and the server's start, which for vLLM is some seconds later.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0kvmesh-port-{port}")
    except OSError:
        claim.close()
        return False
    if not _is_free(host, port):
        claim.close()
        return False
    _claims.append(claim)
    return True


def _is_free(host: str, port: int) -> bool:
    with socket.socket(family(host)) as probe:
        # As servers do: a port whose old connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError:
            return False
    return True


def free_port(host: str, port: int, *, listener: str, taken: int = 0) -> int:
    """`port` if it is free, or for 0 a free port other than `taken`.

    UnavailableError otherwise. `listener`: the name of the listener, for the message.

    An engine gets a port number and listens some seconds later. Meanwhile the kernel may give any port of its ephemeral range to an
    outgoing connection, so the port is outside of that range. It depends on the process id, so that engines that start together choose
    different ports.
    """
    if port:
        _probe(host, port, listener)
        return port
    first, count = _quiet_ports()
    for attempt in range(PORTS_TRIED):
        candidate = first + (os.getpid() * PORTS_TRIED + attempt) % count
        if candidate != taken and _is_free(host, candidate):
            return candidate
    raise UnavailableError(f"no free port for {listener} on {host}", reason="no_free_port")


def _quiet_ports() -> tuple[int, int]:
    """First port and number of ports below the kernel's ephemeral range; by default from 20000."""
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lowest = 32768
    first = min(20000, lowest // 2)
    return max(1024, first), max(1, lowest - max(1024, first))


def _probe(host: str, port: int, listener: str) -> None:
    with socket.socket(family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UnavailableError(
                f"{listener} cannot listen on {host_port(host, port)}: {error.strerror}", reason="port_in_use"
            ) from error
