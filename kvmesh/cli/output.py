"""Output of commands: plain tables, and streams whose reader may close them first, as in `kvmesh up | head`."""

import os
from collections.abc import Sequence
from typing import TextIO

Row = tuple[str, ...]


def discard(stream: TextIO) -> None:
    """Discards buffered and later output. Otherwise Python's flush at exit would fail with BrokenPipeError."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def render_table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Renders left-aligned columns, two spaces apart. Without rows the text says that there are none."""
    widths = [max([len(columns[i]), *(len(row[i]) for row in rows)]) for i in range(len(columns))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [columns, *rows]
    ]
    return "\n".join(lines if rows else [lines[0], "(none)"])
