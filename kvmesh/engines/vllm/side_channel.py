"""Protects vLLM's side channel, over which a reader gets the NIXL metadata of a peer, from clients outside of the mesh.

vLLM's listener answers anyone who connects, and the metadata is enough to read and write the peer's KV. Here both ends use CURVE (RFC 26
of ZeroMQ) with a key that is derived from the mesh's secret. A client must know the server's public key before it connects. This key is
not published: only holders of the secret can compute it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker
from zmq.utils import z85

from kvmesh.errors import UnsupportedError
from kvmesh.identity.secret import MeshSecret

_PURPOSE = "nixl side channel"


def close_side_channel(secret_file: str) -> None:
    """Replaces how vLLM opens the sockets of both ends in this process. UnsupportedError without CURVE."""
    secret = MeshSecret.from_file(secret_file)
    if secret is None:
        return
    if not zmq.has("curve"):
        raise UnsupportedError("this build of ZeroMQ has no CURVE, which protects the NIXL side channel")
    opened = partial(curve_socket, z85.encode(secret.derive(_PURPOSE)))
    base_scheduler.zmq_ctx = base_worker.zmq_ctx = opened


@contextmanager
def curve_socket(server_key: bytes, kind: Any, address: str) -> Iterator[Any]:
    """vLLM's `zmq_ctx` with CURVE: a ROUTER socket serves, a REQ socket connects."""
    context = zmq.Context()
    try:
        channel = context.socket(kind)
        channel.setsockopt(zmq.IPV6, 1)
        if kind == zmq.ROUTER:
            channel.curve_secretkey = server_key
            channel.curve_server = True
            channel.bind(address)
        else:
            channel.curve_publickey, channel.curve_secretkey = zmq.curve_keypair()
            channel.curve_serverkey = zmq.curve_public(server_key)
            channel.connect(address)
        yield channel
    finally:
        context.destroy(linger=0)
