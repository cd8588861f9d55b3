#!/usr/bin/env -S python3 -I -S
"""The images' health check: whether /health of the service in this container answers 200. The argument is its port.

Without an argument it is the port of metrics. Docker starts this every few seconds in each container. http.client and pathlib would double
its CPU time.
"""

import os
import socket
import sys
from collections.abc import Iterator

TIMEOUT_S = 5.0
LISTENING = "0A"
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def main() -> int:
    """Returns 0 if the service is healthy."""
    port = int(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KVMESH_TELEMETRY_METRICS_PORT", "9100"))
    return 0 if any(is_healthy(host, port) for host in hosts(port)) else 1


def hosts(port: int) -> Iterator[str]:
    """The addresses at which something in this container listens on the port: on any of its networks, or on all."""
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in lines_of(f"/proc/net/{name}"):
            _, local, _, state, *_ = line.split()
            address, _, found = local.partition(":")
            if state == LISTENING and int(found, 16) == port:
                # The kernel prints each word of four bytes as a number.
                words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
                yield socket.inet_ntop(family, b"".join(word.to_bytes(4, sys.byteorder) for word in words))


def lines_of(path: str) -> list[str]:
    """The lines of a table, without its heading. Empty if the kernel lacks the protocol."""
    try:
        with open(path, encoding="ascii") as table:
            return table.readlines()[1:]
    except FileNotFoundError:
        return []


def is_healthy(host: str, port: int) -> bool:
    """True if GET /health answers 200."""
    try:
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            connection.sendall(REQUEST)
            with connection.makefile("rb") as answer:
                return answer.readline().split()[1:2] == [b"200"]
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
