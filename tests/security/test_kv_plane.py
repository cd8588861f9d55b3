"""Attacks on the KV plane: vLLM's side channel, which hands out the metadata that NIXL needs to read and write KV."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvmesh.identity.secret import MeshSecret
from tests.parts import require_part
from tests.servers import free_ports

METADATA = b"the address of the KV"


@contextmanager
def listening(key: bytes, address: str) -> Iterator[None]:
    """Answers like vLLM's listener."""
    import zmq

    from kvmesh.engines.vllm.side_channel import curve_socket

    ready, stop = threading.Event(), threading.Event()

    def serve() -> None:
        with curve_socket(key, zmq.ROUTER, address) as channel:
            channel.setsockopt(zmq.RCVTIMEO, 100)
            ready.set()
            while not stop.is_set():
                try:
                    identity, empty, _ = channel.recv_multipart()
                except zmq.Again:
                    continue
                channel.send_multipart((identity, empty, METADATA))

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(30)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def ask(channel: Any, timeout_ms: int) -> bytes:
    """The answer; empty: none."""
    import zmq

    channel.setsockopt(zmq.RCVTIMEO, timeout_ms)
    channel.send(b"get_meta_msg")
    try:
        return bytes(channel.recv())
    except zmq.Again:
        return b""


@pytest.mark.timeout(120)
def test_the_side_channel_answers_members_only() -> None:
    """The attacker connects in plain text, or with a secret of its own, or with CURVE keys but without the server's."""
    require_part("vllm")
    import zmq
    from zmq.utils import z85

    from kvmesh.engines.vllm.side_channel import curve_socket

    own, other = (z85.encode(MeshSecret(letter * 32).derive("nixl side channel")) for letter in (b"s", b"o"))
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    with listening(own, address):
        with curve_socket(own, zmq.REQ, address) as member:
            assert ask(member, 30_000) == METADATA
        with curve_socket(other, zmq.REQ, address) as stranger:
            assert ask(stranger, 1000) == b""
        context = zmq.Context()
        plain = context.socket(zmq.REQ)
        plain.connect(address)
        assert ask(plain, 1000) == b""
        context.destroy(linger=0)
        with curve_socket(own, zmq.REQ, address) as member:
            assert ask(member, 30_000) == METADATA
