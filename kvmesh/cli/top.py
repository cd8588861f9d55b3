"""`kvmesh top`: workers, requests and plan of a mesh in the terminal, refreshed until `q`. Without a terminal: the workers, once."""

import asyncio
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.cli.connection import MeshChoice, MeshConnection, MeshTarget, connect, run_command
from kvmesh.cli.output import Row, render_table
from kvmesh.core import WorkerView
from kvmesh.rpc.mesh.rows import OK, WorkerRow, by_name, worker_rows
from kvmesh.rpc.mesh.view import MeshView
from kvmesh.settings import setting

COLUMNS = (
    "WORKER",
    "ROLE",
    "RUNNING",
    "WAITING",
    "KV USED",
    "TOKENS/S",
    "PROMPT TOKENS/S",
    "HIT RATE",
    "EXCLUDED BY",
)
LIBRARY = "textual"
HINT = "kvmesh: printed once; to watch a mesh in the terminal: pip install 'kvmesh[top]'"


@dataclass(frozen=True, kw_only=True)
class TopSettings(MeshChoice):
    """What to show."""

    interval_s: float = setting(1.0, "time between two refreshes; rates are averages over it", min=0.1, max=3600)
    once: bool = setting(False, "print one table and end; the default where the output is no terminal")
    requests: int = setting(64, "newest requests to list", min=1, max=256)
    timeout_s: float = setting(
        2.0, "longest wait for an answer of a router or planner; with `--once` it is 10 s", min=0.01
    )


def rows_of(views: Sequence[WorkerView], earlier: Mapping[str, WorkerRow] | None = None) -> Sequence[WorkerRow]:
    """Returns the rows of workers that a router lists."""
    return worker_rows(MeshView(workers=views), earlier)


def render_rows(rows: Sequence[WorkerRow]) -> str:
    """Returns a table of one reading."""
    return render_table(COLUMNS, [_row(row) for row in sorted(rows, key=lambda row: row.name)])


def _row(row: WorkerRow) -> Row:
    load = row.load
    return (
        plain(row.name),
        row.role,
        number(None if load is None else load.running_requests),
        number(None if load is None else load.waiting_requests),
        percent(row.kv_usage),
        number(row.output_tokens_per_s),
        number(row.prompt_tokens_per_s),
        percent(row.hit_rate),
        "-" if row.state == OK else plain(row.state),
    )


def plain(text: str) -> str:
    """Returns the text without control characters: names come from other machines, and a terminal obeys such characters."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "\ufffd" for each in text)


def number(value: float | None) -> str:
    """Returns a dash for what is not known."""
    return "-" if value is None else f"{value:.0f}"


def percent(value: float | None) -> str:
    """Returns a share from 0 to 1. A dash for what is not known."""
    return "-" if value is None else f"{value:.0%}"


async def _rows(connection: MeshConnection, earlier: Mapping[str, WorkerRow] | None = None) -> Sequence[WorkerRow]:
    return rows_of(await connection.list_workers(), earlier)


async def _print_once(settings: TopSettings, target: MeshTarget) -> None:
    async with connect(target) as connection:
        earlier = by_name(await _rows(connection))
        await asyncio.sleep(settings.interval_s)
        print(render_rows(await _rows(connection, earlier)))


async def _watch(settings: TopSettings, target: MeshTarget) -> None:
    """Shows the mesh until the user ends it. MeshError if the first reading fails; later failures are shown."""
    # The library takes 0.3 s to import.
    from kvmesh.cli.top_app import watch

    async with connect(target) as connection:
        await _rows(connection)
        await watch(connection, settings, title=settings.mesh or target.address)


def main(argv: Sequence[str]) -> int:
    return run_command(TopSettings, argv, _show, program="kvmesh top", description=__doc__)


def _show(settings: TopSettings) -> int:
    has_terminal = sys.stdout.isatty() and sys.stdin.isatty()
    has_library = importlib.util.find_spec(LIBRARY) is not None
    show = _watch if has_terminal and has_library and not settings.once else _print_once
    asyncio.run(show(settings, settings.target()))
    if has_terminal and not has_library and not settings.once:
        print(HINT, file=sys.stderr)
    return 0
