"""Attacks on the KV plane: vLLM's side channel, which returns the metadata that NIXL needs to read and write KV."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmesh.identity.secret import MeshSecret
from tests.parts import require_part
from tests.servers import free_ports

METADATA = b"the address of the KV"


@pytest.fixture
def secret_file(tmp_path: Path) -> Iterator[str]:
    """Closes the side channel of this process with a mesh secret. Yields the secret's file. Restores vLLM's sockets on exit."""
    require_part("vllm")
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker

    from kvmesh.engines.vllm.side_channel import close_side_channel

    before = base_scheduler.zmq_ctx, base_worker.zmq_ctx
    (tmp_path / "secret").write_bytes(b"s" * 32)
    close_side_channel(str(tmp_path / "secret"))
    yield str(tmp_path / "secret")
    base_scheduler.zmq_ctx, base_worker.zmq_ctx = before


@contextmanager
def listening(port: int) -> Iterator[None]:
    """Runs vLLM's own listener, as the engine of a prefill worker does."""
    from kvmesh.engines.vllm.connector import HoldingScheduler

    ready, stop = threading.Event(), threading.Event()
    arguments = ({(0, 0): METADATA}, ready, stop, "127.0.0.1", port)
    thread = threading.Thread(target=HoldingScheduler._nixl_handshake_listener, args=arguments)
    thread.start()
    assert ready.wait(30)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def ask(channel: Any, timeout_ms: int) -> bytes:
    """Requests the metadata as vLLM does. Returns it; empty if there is no answer."""
    import msgspec
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

    channel.setsockopt(zmq.RCVTIMEO, timeout_ms)
    channel.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
    try:
        return bytes(channel.recv_multipart()[0])
    except zmq.Again:
        return b""


def test_the_side_channel_answers_members_only(secret_file: str) -> None:
    """A client that connects in plain text or with another secret gets no answer. A member, which uses vLLM's own socket, gets the metadata."""
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from zmq.utils import z85

    from kvmesh.engines.vllm.side_channel import curve_socket

    other = z85.encode(MeshSecret(b"o" * 32).derive("nixl side channel"))
    port = free_ports(1)[0]
    address = f"tcp://127.0.0.1:{port}"
    with listening(port):
        for _ in range(2):
            with base_worker.zmq_ctx(zmq.REQ, address) as member:
                assert ask(member, 30_000) == METADATA
            with curve_socket(other, zmq.REQ, address) as stranger:
                assert ask(stranger, 1000) == b""
            context = zmq.Context()
            plain = context.socket(zmq.REQ)
            plain.connect(address)
            assert ask(plain, 1000) == b""
            context.destroy(linger=0)
