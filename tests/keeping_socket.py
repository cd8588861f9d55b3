"""The lowest seam of a stream: what is written to its socket."""

import asyncio
from typing import Any


class RecordingSocket(asyncio.Transport):
    """Keeps each write; `unsent` is how many bytes a slow client has left in the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.unsent = 0
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed
