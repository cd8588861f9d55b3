"""The port of the NIXL side channel must stay free for seconds, from its choice until vLLM listens on it."""

import socket
from pathlib import Path

import pytest

from kvmesh.errors import UnavailableError
from kvmesh.network.ports import free_port

HOST = "127.0.0.1"


def test_the_port_is_outside_the_ephemeral_range() -> None:
    """An outgoing connection of any process may take an ephemeral port at any time."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 <= free_port(HOST, 0, listener="a test") < lowest


def test_a_busy_port_is_skipped_and_a_busy_configured_port_is_refused() -> None:
    """With 0 another port is chosen. A port that the settings name must be free."""
    port = free_port(HOST, 0, listener="a test")
    with socket.create_server((HOST, port)):
        assert free_port(HOST, 0, listener="a test") != port
        with pytest.raises(UnavailableError, match=str(port)):
            free_port(HOST, port, listener="a test")
