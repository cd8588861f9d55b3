"""A transport that records what is written to it."""

import asyncio
from typing import Any


class RecordingSocket(asyncio.Transport):
    """Records each write. `unsent` is the number of buffered bytes that a slow client has not read."""

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
