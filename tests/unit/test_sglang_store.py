"""The PyTorch store of SGLang's ranks listens only on the address to which the ranks connect."""

import socket

import pytest

from kvmesh.engines.sglang.host.patches import listen


def test_the_store_listens_on_the_address_of_the_ranks() -> None:
    listener = listen("127.0.0.1", 0)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_an_address_of_another_machine_is_left_to_pytorch() -> None:
    """For example, the name of a Kubernetes service does not belong to a local interface."""
    assert listen("203.0.113.9", 0) is None


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", taken.getsockname()[1])
