"""Plain tables for a terminal."""

from collections.abc import Sequence

Row = tuple[str, ...]


def render_table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Renders left-aligned columns, two spaces apart. Without rows the text says that there are none."""
    widths = [max([len(columns[i]), *(len(row[i]) for row in rows)]) for i in range(len(columns))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [columns, *rows]
    ]
    return "\n".join(lines if rows else [lines[0], "(none)"])
