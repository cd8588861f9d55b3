"""Output whose reader may close it first, as in `kvmesh up | head`."""

import os
from typing import TextIO


def discard(stream: TextIO) -> None:
    """Discards buffered and later output. Otherwise Python's flush at exit would fail with BrokenPipeError."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
