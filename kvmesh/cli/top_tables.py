"""The tables of `kvmesh top`: their columns, and rows that keep their place from one reading to the next."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text
from textual.widgets import DataTable

from kvmesh.cli.top import number, percent, plain
from kvmesh.core import RequestState, RequestView
from kvmesh.core.planning import Decision, Shape
from kvmesh.rpc.mesh.rows import OK, PoolRow, WorkerRow
from kvmesh.rpc.mesh.view import MeshView
from kvmesh.rpc.router.explanations import worker_name

BAR_CELLS = 10
FULL, ALMOST = 0.95, 0.85
GOOD, WARN, BAD = "green", "yellow", "red"
ENDED_BADLY = (RequestState.FAILED, RequestState.REFUSED)


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a table, with its id."""

    id: str
    row: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column. `text` and `sort` get the row; `sort` None: rows sort by the text."""

    title: str
    text: Callable[[Any], str]
    value: Callable[[Any], float | None] | None = None
    style: Callable[[Any], str] | None = None

    @property
    def is_number(self) -> bool:
        return self.value is not None

    def sort(self, row: Any) -> float | str | None:
        """Returns what the row is sorted by."""
        return self.text(row) if self.value is None else self.value(row)

    def cell(self, row: Any) -> Text:
        """Returns the cell. Its text is never parsed as markup."""
        style = self.style(row) if self.style is not None else ""
        return Text(plain(self.text(row)), style=style, justify="right" if self.is_number else "left", no_wrap=True)


def counted(title: str, value: Callable[[Any], float | None], text: Callable[[float | None], str] = number) -> Column:
    """Returns a column of numbers."""
    return Column(title=title, text=lambda row: text(value(row)), value=value)


def bar(share: float | None) -> str:
    """Returns a share from 0 to 1 as a bar and a number."""
    if share is None:
        return "-"
    filled = round(max(0.0, min(1.0, share)) * BAR_CELLS)
    return f"{'█' * filled}{'░' * (BAR_CELLS - filled)} {share:4.0%}"


def usage_style(share: float | None) -> str:
    """Returns the colour of a share."""
    return "" if share is None or share < ALMOST else BAD if share >= FULL else WARN


def milliseconds(value: float | None) -> str:
    """Formats a time. A dash stands for an unknown one."""
    return "-" if value is None else f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def _load(name: str) -> Callable[[WorkerRow], float | None]:
    return lambda row: None if row.load is None else float(getattr(row.load, name))


def _state_style(row: WorkerRow) -> str:
    return GOOD if row.state == OK else WARN if row.state in ("draining", "joining", "paths lost") else BAD


WORKERS: Sequence[Column] = (
    Column(title="Worker", text=lambda row: row.name),
    Column(title="Role", text=lambda row: row.role),
    Column(title="Model", text=lambda row: row.model),
    Column(title="Engine", text=lambda row: row.engine),
    Column(title="State", text=lambda row: row.state, style=_state_style),
    counted("Running", _load("running_requests")),
    counted("Waiting", _load("waiting_requests")),
    counted("Placed", lambda row: float(row.requests_in_flight)),
    Column(
        title="KV in use",
        text=lambda row: bar(row.kv_usage),
        value=lambda row: row.kv_usage,
        style=lambda row: usage_style(row.kv_usage),
    ),
    counted("Prompt/s", lambda row: row.prompt_tokens_per_s),
    counted("Output/s", lambda row: row.output_tokens_per_s),
    counted("Hits", lambda row: row.hit_rate, percent),
    Column(title="Index", text=lambda row: row.trust or "-"),
)


def _pool_usage(row: PoolRow) -> float | None:
    return row.kv_blocks_used / row.kv_blocks_total if row.kv_blocks_total else None


POOLS: Sequence[Column] = (
    Column(title="Model", text=lambda row: row.model),
    Column(title="Role", text=lambda row: row.role),
    counted("Ready", lambda row: float(row.workers_ready)),
    counted("Workers", lambda row: float(row.workers)),
    counted("Planned", lambda row: None if row.workers_planned is None else float(row.workers_planned)),
    counted("Running", lambda row: float(row.running_requests)),
    counted("Waiting", lambda row: float(row.waiting_requests)),
    Column(title="KV in use", text=lambda row: bar(_pool_usage(row)), value=_pool_usage),
    counted("Prompt/s", lambda row: row.prompt_tokens_per_s),
    counted("Output/s", lambda row: row.output_tokens_per_s),
)


def _request_style(row: RequestView) -> str:
    return BAD if row.state in ENDED_BADLY else "cyan" if row.state.is_in_flight else ""


def _where(row: RequestView) -> str:
    return " → ".join(filter(None, (worker_name(row.prefill), worker_name(row.decode)))) or "-"


REQUESTS: Sequence[Column] = (
    Column(title="Request", text=lambda row: row.request_id),
    Column(title="State", text=lambda row: row.state.value, style=_request_style),
    Column(title="Where", text=_where),
    counted("Prompt", lambda row: float(row.prompt_tokens)),
    counted("Cached", lambda row: float(row.cached_tokens)),
    counted("Output", lambda row: float(row.output_tokens) or None),
    counted("First token", lambda row: row.observed_ttft_s, milliseconds),
    Column(title="Tenant", text=lambda row: row.tenant or "-"),
    Column(title="Reason", text=lambda row: row.reason or "-"),
)


def _shape(shape: Shape) -> str:
    return f"{shape.prefill_workers} + {shape.decode_workers}"


def _change(row: Decision) -> str:
    ready = _shape(row.inputs.ready)
    return f"{ready} → {_shape(row.shape)}" if row.action.changes_pools else ready


def _time(row: Decision) -> str:
    return time.strftime("%H:%M:%S", time.localtime(row.decided_at_s))


DECISIONS: Sequence[Column] = (
    Column(title="Time", text=_time),
    Column(title="Model", text=lambda row: row.model),
    Column(title="Action", text=lambda row: row.action.value),
    Column(title="Prefill + decode", text=_change),
    counted("Requests/s", lambda row: row.inputs.observed.requests_per_s, lambda value: f"{value:.2f}"),
    counted("Predicted", lambda row: row.inputs.predicted.requests_per_s, lambda value: f"{value:.2f}"),
    Column(title="Reason", text=lambda row: row.reason),
    Column(title="Outcome", text=lambda row: row.outcome.value),
)


def totals(view: MeshView, pools: Sequence[PoolRow]) -> Text:
    """Returns the line above the tables."""
    ready, workers = sum(pool.workers_ready for pool in pools), sum(pool.workers for pool in pools)
    used, blocks = sum(pool.kv_blocks_used for pool in pools), sum(pool.kv_blocks_total for pool in pools)
    running = sum(pool.running_requests for pool in pools if pool.role == "decode")
    waiting = sum(pool.waiting_requests for pool in pools) + view.requests.requests_queued
    parts = (
        ("Workers ready ", f"{ready}/{workers}", GOOD if ready == workers else WARN),
        ("Running ", f"{running}", ""),
        ("Waiting ", f"{waiting}", ""),
        ("Output/s ", f"{sum(pool.output_tokens_per_s for pool in pools):.0f}", ""),
        ("KV in use ", f"{used / blocks:.0%}" if blocks else "-", ""),
    )
    line = Text(no_wrap=True)
    for name, value, style in parts:
        line.append(name, style="dim").append(f"{value}   ", style=f"bold {style}".strip())
    return line


class MeshTable(DataTable[Text]):
    """A table that sorts and filters its records."""

    def __init__(self, name: str, columns: Sequence[Column]) -> None:
        super().__init__(id=name, cursor_type="row", zebra_stripes=True)
        self._mesh_columns = columns
        self._records: Mapping[str, Record] = {}
        self._words: Sequence[str] = ()
        self._shown: Sequence[str] = ()
        self._sorted_by: Column | None = None
        self._is_reversed = False

    def on_mount(self) -> None:
        """Adds the columns."""
        for column in self._mesh_columns:
            self.add_column(column.title, key=column.title)

    @property
    def chosen_id(self) -> str:
        """The id of the record at the cursor. Empty: there is none."""
        row = self.cursor_row
        return self._shown[row] if 0 <= row < len(self._shown) else ""

    def show(self, records: Sequence[Record]) -> None:
        """Replaces the records. Ids are unique."""
        self._records = {record.id: record for record in records}
        self._arrange()

    def filter(self, text: str) -> None:
        """Shows the records that have each word."""
        self._words = text.lower().split()
        self._arrange()

    def sort_next(self) -> str:
        """Sorts by the next column, largest number first. Returns its title."""
        at = -1 if self._sorted_by is None else self._mesh_columns.index(self._sorted_by)
        self._sorted_by = self._mesh_columns[(at + 1) % len(self._mesh_columns)]
        self._is_reversed = self._sorted_by.is_number
        self._arrange()
        return self._sorted_by.title

    def reverse(self) -> None:
        """Turns the order round."""
        self._is_reversed = not self._is_reversed
        self._arrange()

    def _arrange(self) -> None:
        wanted = self._ordered()
        if wanted == self._shown:
            self._update_cells()
            return
        chosen, offset = self.chosen_id, self.scroll_offset
        self._shown = wanted
        self.clear()
        for key in wanted:
            self.add_row(*self._cells(key), key=key)
        if wanted:
            row = wanted.index(chosen) if chosen in wanted else min(self.cursor_row, len(wanted) - 1)
            self.move_cursor(row=row, animate=False, scroll=False)
        self.scroll_to(offset.x, offset.y, animate=False)

    def _ordered(self) -> Sequence[str]:
        keys = [key for key in self._records if self._matches(key)]
        column = self._sorted_by
        if column is None:
            return keys[::-1] if self._is_reversed else keys
        # All of a column are numbers, or all are texts.
        values: dict[str, Any] = {key: column.sort(self._records[key].row) for key in keys}
        known = sorted(
            (key for key in keys if values[key] is not None), key=lambda key: values[key], reverse=self._is_reversed
        )
        return [*known, *(key for key in keys if values[key] is None)]

    def _matches(self, key: str) -> bool:
        if not self._words:
            return True
        text = " ".join(column.text(self._records[key].row) for column in self._mesh_columns).lower()
        return all(word in text for word in self._words)

    def _cells(self, key: str) -> Sequence[Text]:
        return [column.cell(self._records[key].row) for column in self._mesh_columns]

    def _update_cells(self) -> None:
        for key in self._shown:
            for column, cell in zip(self._mesh_columns, self._cells(key), strict=True):
                if self.get_cell(key, column.title) != cell:
                    self.update_cell(key, column.title, cell, update_width=True)
