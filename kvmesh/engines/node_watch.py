"""Connections between the machines of one engine, so that it ends on all of them when it ends on one.

The engine's ranks meet at `nodes_address`. The next port is the leader's here: each other machine connects to it, both prove that they
know the mesh's secret, and both send a byte every INTERVAL_S.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from kvmesh.engines.nodes import watch_address
from kvmesh.errors import UnavailableError
from kvmesh.identity.secret import MeshSecret

PURPOSE = "engine node"
NONCE_BYTES = TAG_BYTES = 32
RANK_BYTES = 4
INTERVAL_S = 1.0
SILENCE_S = 10.0
"""Threads of a process that loads a model get no time for seconds."""
HANDSHAKE_S = 5.0
"""Limit of a whole handshake, so that a stranger who sends a byte from time to time does not keep the leader from its machines."""
RETRY_S = 0.2
UNKEYED = bytes(32)
"""The key in a mesh without a secret."""
End = Callable[[str], None]


def end_process(reason: str) -> None:
    """Ends the process immediately: without the others, a rank would wait for them forever."""
    sys.stderr.write(f"{reason}; this process ends\n")
    sys.stderr.flush()
    os._exit(1)


class NodeWatch:
    """This machine's connections to the others. `end` is called with the reason, in another thread, when one of them is gone."""

    def __init__(
        self,
        *,
        nodes: int,
        node_rank: int,
        nodes_address: str,
        secret_file: str,
        start_timeout_s: float,
        end: End = end_process,
    ) -> None:
        self._nodes = nodes
        self._node_rank = node_rank
        self._address = nodes_address
        self._secret_file = secret_file
        self._start_timeout_s = start_timeout_s
        self._end = end
        self._is_closed = False
        self._sockets: list[socket.socket] = []

    def join(self) -> None:
        """Starts the watch. UnavailableError when the leader cannot be reached within the start's time limit."""
        if self._nodes == 1:
            return
        secret = MeshSecret.from_file(self._secret_file) or MeshSecret(UNKEYED)
        if self._node_rank:
            self._follow(secret)
        else:
            self._lead(secret)

    def close(self) -> None:
        """Ends the connections, and with them the engine on the other machines. `end` is not called afterwards."""
        self._is_closed = True
        for each in self._sockets:
            _close(each)

    def _lead(self, secret: MeshSecret) -> None:
        host, port = watch_address(self._address)
        listener = socket.create_server((host, port), family=_family(host))
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=(secret, listener), name="nodes", daemon=True).start()

    def _accept(self, secret: MeshSecret, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._is_closed:
                    return
                # Without a free descriptor, for example, the connection stays in the queue.
                time.sleep(RETRY_S)
                continue
            try:
                rank = greet(secret, connection)
            except (OSError, ValueError):
                rank = 0
            if 0 < rank < self._nodes:
                self._watch(connection, f"machine {rank} of the engine")
            else:
                connection.close()

    def _follow(self, secret: MeshSecret) -> None:
        host, port = watch_address(self._address)
        last = time.monotonic() + self._start_timeout_s
        while not self._is_closed:
            try:
                connection = socket.create_connection((host, port), timeout=HANDSHAKE_S)
                introduce(secret, connection, self._node_rank)
            except (OSError, ValueError) as error:
                if time.monotonic() > last:
                    raise UnavailableError(
                        f"the engine's leader at {host}:{port} cannot be reached: {error}", reason="engine_start_failed"
                    ) from error
                time.sleep(RETRY_S)
            else:
                self._watch(connection, "the leader of the engine")
                return

    def _watch(self, connection: socket.socket, name: str) -> None:
        self._sockets.append(connection)
        if self._is_closed:
            # `close` in another thread may have ended before the append.
            _close(connection)
        else:
            watch(connection, name, self._lost)

    def _lost(self, reason: str) -> None:
        if not self._is_closed:
            self._end(reason)


def _close(connection: socket.socket) -> None:
    # A thread that waits for the socket returns only from a shutdown.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def greet(secret: MeshSecret, connection: socket.socket) -> int:
    """Returns the leader's side of the handshake: the number of the machine. ValueError: the other side does not know the secret."""
    ends_s = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    mine = os.urandom(NONCE_BYTES)
    connection.sendall(mine)
    theirs, rank = _receive(connection, NONCE_BYTES, ends_s), _receive(connection, RANK_BYTES, ends_s)
    # The side's name is a part of the tag, so a side cannot be answered with its own tag. Both nonces make old tags useless.
    if not secret.is_tag(_receive(connection, TAG_BYTES, ends_s), PURPOSE, (b"follower", mine, theirs, rank)):
        raise ValueError("the other machine does not know the mesh's secret")
    connection.sendall(secret.tag(PURPOSE, (b"leader", mine, theirs, rank)))
    return int.from_bytes(rank)


def introduce(secret: MeshSecret, connection: socket.socket, node_rank: int) -> None:
    """The other side of `greet`. ValueError: the leader does not know the secret."""
    ends_s = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    mine, rank = os.urandom(NONCE_BYTES), node_rank.to_bytes(RANK_BYTES)
    theirs = _receive(connection, NONCE_BYTES, ends_s)
    connection.sendall(mine + rank + secret.tag(PURPOSE, (b"follower", theirs, mine, rank)))
    if not secret.is_tag(_receive(connection, TAG_BYTES, ends_s), PURPOSE, (b"leader", theirs, mine, rank)):
        raise ValueError("the leader does not know the mesh's secret")


def watch(connection: socket.socket, name: str, end: End, *, silence_s: float = SILENCE_S) -> None:
    """Calls `end` with the reason, in another thread, when the other side is gone or silent."""
    connection.settimeout(silence_s)
    for work in (_send, _expect):
        threading.Thread(target=work, args=(connection, name, end), name="nodes", daemon=True).start()


def _send(connection: socket.socket, name: str, end: End) -> None:
    try:
        while True:
            connection.sendall(b".")
            time.sleep(INTERVAL_S)
    except OSError as error:
        end(f"{name} is gone: {error}")


def _expect(connection: socket.socket, name: str, end: End) -> None:
    try:
        while connection.recv(4096):
            pass
        end(f"{name} has ended")
    except TimeoutError:
        end(f"{name} is silent")
    except OSError as error:
        end(f"{name} is gone: {error}")


def _receive(connection: socket.socket, count: int, ends_s: float) -> bytes:
    """Raises TimeoutError at `ends_s` of the monotonic clock, and ConnectionError at the end of the stream."""
    received = b""
    while len(received) < count:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake did not end in time")
        connection.settimeout(left_s)
        if not (data := connection.recv(count - len(received))):
            raise ConnectionError("the connection was closed")
        received += data
    return received


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
