"""The NIXL side channel's port: vLLM listens on it seconds after it was chosen, so it must stay free until then."""

import socket
from pathlib import Path

import pytest

from kvmesh.errors import UnavailableError
from kvmesh.network.ports import free_port

HOST = "127.0.0.1"


def test_the_port_is_none_that_the_kernel_gives_away() -> None:
    """An outgoing connection of any process may take a port of the kernel's range at any time."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 <= free_port(HOST, 0, listener="a test") < lowest


def test_a_busy_port_is_passed_over_and_a_named_one_refused() -> None:
    """0 finds another one; a number that the settings name must be free."""
    port = free_port(HOST, 0, listener="a test")
    with socket.create_server((HOST, port)):
        assert free_port(HOST, 0, listener="a test") != port
        with pytest.raises(UnavailableError, match=str(port)):
            free_port(HOST, port, listener="a test")
