"""`kvmesh top`: the workers of a mesh as a table that refreshes until Ctrl-C. Without a terminal it is printed once."""

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.cli.connection import SERVICE_VARIABLES, MeshChoice, MeshConnection, MeshTarget, connect
from kvmesh.cli.tables import Row, render_table
from kvmesh.core import LoadRecord, WorkerView
from kvmesh.errors import MeshError
from kvmesh.settings import SettingsError, load, setting

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
CLEAR, HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"
"""ECMA-48 control sequences, which all terminals understand."""


@dataclass(frozen=True, kw_only=True)
class TopSettings(MeshChoice):
    """What to show."""

    interval_s: float = setting(1.0, "time between two refreshes; rates are averages over it", min=0.1, max=3600)
    once: bool = setting(False, "print one table and end; the default where the output is no terminal")


Sample = Mapping[str, WorkerView]
"""The workers at one time, by id and data-parallel rank."""


def sample_of(views: Sequence[WorkerView]) -> Sample:
    return {_name(view): view for view in views}


def render_sample(sample: Sample, earlier: Sample) -> str:
    """A table of one sample. Rates are the change since the earlier sample."""
    return render_table(COLUMNS, [_row(name, sample[name], earlier.get(name)) for name in sorted(sample)])


def _name(view: WorkerView) -> str:
    rank = view.worker.data_parallel_rank
    return view.worker.worker_id if rank is None else f"{view.worker.worker_id}/{rank}"


def _row(name: str, view: WorkerView, earlier: WorkerView | None) -> Row:
    record, excluded = view.load, view.excluded_by or "-"
    if record is None:
        return (name, view.role.value, *("-",) * 6, excluded)
    used = f"{record.kv_blocks_used / record.kv_blocks_total:.0%}" if record.kv_blocks_total else "-"
    rates = _rates(record, None if earlier is None else earlier.load)
    return (
        name,
        view.role.value,
        str(record.running_requests),
        str(record.waiting_requests),
        used,
        *rates,
        _hit_rate(record),
        excluded,
    )


def _rates(record: LoadRecord, earlier: LoadRecord | None) -> tuple[str, str]:
    """Output and prompt tokens per second, by the worker's clock. A worker that has restarted counts from 0 again: unknown."""
    if earlier is None or earlier.epoch != record.epoch:
        return "-", "-"
    elapsed_s = record.taken_at_s - earlier.taken_at_s
    if elapsed_s <= 0:
        return "0", "0"
    output = record.output_tokens_total - earlier.output_tokens_total
    prompt = record.prompt_tokens_total - earlier.prompt_tokens_total
    return f"{output / elapsed_s:.0f}", f"{prompt / elapsed_s:.0f}"


def _hit_rate(record: LoadRecord) -> str:
    """The share of prompt tokens that were in the worker's cache, since it started."""
    tokens = record.prompt_tokens_total + record.cached_tokens_total + record.transferred_tokens_total
    return f"{record.cached_tokens_total / tokens:.0%}" if tokens else "-"


def screen(text: str, *, columns: int, lines: int) -> str:
    """What to write so that a terminal of this size shows the text in place of what it showed before."""
    shown = [line[:columns] + CLEAR_LINE for line in text.splitlines()[: lines - 1]]
    return HOME + "\n".join(shown) + "\n" + CLEAR_BELOW


async def _sample(connection: MeshConnection) -> Sample:
    return sample_of(await connection.list_workers())


async def _print_once(settings: TopSettings, target: MeshTarget) -> None:
    async with connect(target) as connection:
        earlier = await _sample(connection)
        await asyncio.sleep(settings.interval_s)
        print(render_sample(await _sample(connection), earlier))


async def _refresh(settings: TopSettings, target: MeshTarget) -> None:
    """Redraws until it is cancelled. MeshError if the first sample fails; later failures are shown, because routers restart."""
    title = f"{settings.mesh or target.address}, every {settings.interval_s:g} s, Ctrl-C ends\n\n"
    async with connect(target) as connection:
        sample = await _sample(connection)
        text = render_sample(sample, {})
        print(CLEAR, end="")
        while True:
            width, height = shutil.get_terminal_size()
            print(screen(title + text, columns=width, lines=height), end="", flush=True)
            await asyncio.sleep(settings.interval_s)
            try:
                earlier, sample = sample, await _sample(connection)
                text = render_sample(sample, earlier)
            except MeshError as error:
                text = f"kvmesh: {error.message}"


def main(argv: Sequence[str]) -> int:
    try:
        settings = load(
            TopSettings,
            argv=argv,
            environ=os.environ,
            program="kvmesh top",
            description=__doc__ or "",
            foreign_variables=SERVICE_VARIABLES,
        )
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    show = _print_once if settings.once or not sys.stdout.isatty() else _refresh
    try:
        asyncio.run(show(settings, settings.target()))
        return 0
    except MeshError as error:
        print(f"kvmesh: {error.message}", file=sys.stderr)
        return 1
