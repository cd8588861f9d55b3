"""The engine process's end of the socket to the adapter. One thread receives; any thread sends."""

import contextlib
import os
import select
import socket
import threading
import time

from kvmesh.engines.sglang.messages import (
    ALIVE_INTERVAL_S,
    Alive,
    FromHost,
    ToHost,
    frame,
    take_frames,
    to_host_decoder,
)

READ_BYTES = 1 << 20


class HostSocket:
    """Sends and receives messages. The process ends immediately when the adapter's end is closed, because no one could use its results."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = bytearray()
        self._sending = threading.Lock()

    @classmethod
    def connect(cls, path: str) -> "HostSocket":
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(path)
        return cls(connected)

    def send(self, message: FromHost) -> None:
        """Blocks while the adapter does not read, which pauses the engine."""
        try:
            with self._sending:
                self._socket.sendall(frame(message))
        except OSError:
            _end()

    def receive(self) -> list[ToHost]:
        """Returns the messages that have arrived. Does not wait."""
        with contextlib.suppress(BlockingIOError):
            while data := self._read():
                self._received += data
                # A short read has emptied the socket, which saves a further call.
                if len(data) < READ_BYTES:
                    break
        return [to_host_decoder.decode(body) for body in take_frames(self._received)]

    def send_alive(self) -> None:
        """Starts a thread that says that this process runs."""
        threading.Thread(target=self._send_alive, name="alive", daemon=True).start()

    def _send_alive(self) -> None:
        while True:
            self.send(Alive())
            time.sleep(ALIVE_INTERVAL_S)

    def wait(self, timeout_s: float) -> None:
        """Until a message arrives."""
        select.select([self._socket], [], [], timeout_s)

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except ConnectionError:
            data = b""
        if not data:
            _end()
        return data


def _end() -> None:
    os._exit(0)
