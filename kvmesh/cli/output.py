"""Output whose reader may go away: `kvmesh up | head`, a closed terminal."""

import os
from typing import TextIO


def discard(stream: TextIO) -> None:
    """Discards what is still buffered and all that follows. Python flushes when it exits, which must not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
