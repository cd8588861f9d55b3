"""Limits of the work and memory of a block, by measures that are the same on an idle and on a busy machine. CPU time is not."""

import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class LinesRun:
    """The number of lines of Python so far. Above `most` the line that runs raises AssertionError, so that endless work ends."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.count += 1
        if self.count > self.most:
            # Python ends the tracing with the error.
            raise AssertionError(f"more than {self.most} lines of Python")
        return self.trace


@contextmanager
def at_most_lines(most: int) -> Iterator[LinesRun]:
    """Fails if this thread runs more than `most` lines of Python in functions that the block calls. C code counts as the line that calls it."""
    lines, before = LinesRun(most), sys.gettrace()
    sys.settrace(lines.trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
    # The block may have handled the error.
    assert lines.count <= most, f"more than {most} lines of Python"


@contextmanager
def at_most_bytes(most: int) -> Iterator[None]:
    """Fails if Python's memory, of all threads, grows by more than `most` bytes at any time within the block."""
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= most, f"{peak_bytes} bytes"
