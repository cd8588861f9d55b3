"""The application of `kvmesh top`: keys, terminal sizes, and a mesh that changes and fails."""

import asyncio
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Input, TabbedContent

from kvmesh.cli.top_app import TextScreen, TopApp
from kvmesh.cli.top_tables import MeshTable
from kvmesh.core import LoadRecord, RequestList, RequestState, RequestView, Role, WorkerRef, WorkerView
from kvmesh.errors import NotFoundError, UnavailableError
from kvmesh.rpc.mesh.view import MeshView
from tests.parts import ROOT
from tests.patience import PATIENCE_S
from tests.ui.fleet import plan

HOSTILE = "[red]d[/]\x1b[2J"
"""Markup of the library, and a sequence that clears a terminal."""


def worker(name: str, *, kv: int, role: Role = Role.DECODE) -> WorkerView:
    load = LoadRecord(worker_id=name, epoch=1, running_requests=kv // 10, kv_blocks_used=kv, kv_blocks_total=100)
    return WorkerView(
        worker=WorkerRef(worker_id=name, address="x:1", epoch=1), role=role, model="demo", trust="exact", load=load
    )


@dataclass
class Mesh:
    """A data source that a test changes."""

    view: MeshView = field(default_factory=MeshView)
    failure: UnavailableError | None = None
    asked: list[str] = field(default_factory=list)
    readings: int = 0

    async def read(self) -> MeshView:
        self.readings += 1
        if self.failure is not None:
            raise self.failure
        return self.view

    async def explain(self, request_id: str) -> str:
        self.asked.append(request_id)
        if request_id == "gone":
            raise NotFoundError("no router knows it")
        return f"request   {request_id}\nplaced    [bold]prefill p1[/], decode d1"


def mesh() -> Mesh:
    """Returns 64 workers, two requests and a plan."""
    workers = [worker(f"d{i:02d}", kv=i) for i in range(63)]
    requests = [
        RequestView(request_id=name, model="demo", state=RequestState.DECODING, decided_at_s=1.0)
        for name in ("r1", "gone")
    ]
    return Mesh(
        MeshView(workers=[*workers, worker(HOSTILE, kv=99)], requests=RequestList(requests=requests), plan=plan())
    )


def app_of(source: Mesh) -> TopApp:
    return TopApp(source, title="a mesh", interval_s=3600)


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Waits until the condition holds. `press` and `pause` only wait until the process seems to be idle."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await pilot.pause(0.01)


async def settle(pilot: Pilot[None], source: Mesh) -> None:
    """Waits until the application has handled a new reading."""
    seen = source.readings
    assert isinstance(pilot.app, TopApp)
    pilot.app.action_read()
    await until(pilot, lambda: source.readings > seen)
    await pilot.pause()


async def press_for_focus(pilot: Pilot[None], key: str, widget: Widget) -> None:
    """Presses a key that moves the focus to the widget, and waits for that. Until then further keys would go to another widget."""
    await pilot.press(key)
    await until(pilot, lambda: widget.has_focus)


def shows(pilot: Pilot[None], text: str) -> bool:
    return text in pilot.app.export_screenshot().replace("&#160;", " ")


def first_cells(table: MeshTable) -> list[str]:
    return [str(table.get_row_at(row)[0]) for row in range(table.row_count)]


async def test_workers_are_listed_sorted_and_filtered_by_keys() -> None:
    """All 64 workers can be sorted by name and by KV in use, and filtered by text. The chosen row stays chosen."""
    source = mesh()
    async with app_of(source).run_test(size=(150, 40)) as pilot:
        await settle(pilot, source)
        table = pilot.app.query_one("#workers", MeshTable)
        await until(pilot, lambda: table.row_count == 64)
        await pilot.press("down", "down")
        await until(pilot, lambda: table.cursor_row == 2)
        chosen = table.chosen_id
        for _ in range(9):
            await pilot.press("s")
        await until(pilot, lambda: first_cells(table)[:2] == ["[red]d[/]\ufffd[2J", "d62"])
        await until(pilot, lambda: table.chosen_id == chosen)
        await pilot.press("r")
        await until(pilot, lambda: first_cells(table)[0] == "d00")
        await press_for_focus(pilot, "slash", pilot.app.query_one("#filter"))
        await pilot.press("d", "0", "enter")
        await until(pilot, lambda: first_cells(table) == [f"d{i:02d}" for i in range(10)])
        await pilot.press("escape")
        await until(pilot, lambda: table.row_count == 64)


async def test_views_and_explanations_are_reachable_by_keys() -> None:
    """Number keys change the view. Enter on a request shows its decision without interpreting markup, or why there is none."""
    source = mesh()
    async with app_of(source).run_test(size=(150, 40)) as pilot:
        await settle(pilot, source)
        await pilot.press("2")
        await until(pilot, lambda: pilot.app.query_one(TabbedContent).active == "view-pools")
        await until(pilot, lambda: first_cells(pilot.app.query_one("#pools", MeshTable)) == ["demo", "demo"])
        await pilot.press("4")
        await until(pilot, lambda: pilot.app.query_one("#planner", MeshTable).row_count == 1)
        requests = pilot.app.query_one("#requests", MeshTable)
        await press_for_focus(pilot, "3", requests)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, TextScreen))
        assert source.asked == ["r1"]
        await until(pilot, lambda: shows(pilot, "[bold]prefill p1[/]"))
        await press_for_focus(pilot, "escape", requests)
        await pilot.press("down")
        await until(pilot, lambda: requests.cursor_row == 1)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, TextScreen))
        assert source.asked == ["r1", "gone"]


async def test_changes_and_failures_are_shown() -> None:
    """A worker that leaves and a router that fails are shown. After a failure of the registry, the mesh is shown again."""
    source = mesh()
    async with app_of(source).run_test(size=(150, 40)) as pilot:
        await settle(pilot, source)
        table = pilot.app.query_one("#workers", MeshTable)
        source.view = replace(source.view, workers=source.view.workers[1:], problems=("router-1: away",))
        await settle(pilot, source)
        await until(pilot, lambda: table.row_count == 63)
        await until(pilot, lambda: shows(pilot, "router-1: away"))
        source.failure = UnavailableError("the registry is away")
        await settle(pilot, source)
        await until(pilot, lambda: shows(pilot, "the registry is away"))
        assert table.row_count == 63
        assert pilot.app.query_one("#problem").display
        source.failure, source.view = None, mesh().view
        await settle(pilot, source)
        await until(pilot, lambda: table.row_count == 64)
        await until(pilot, lambda: not pilot.app.query_one("#problem").display)


@pytest.mark.parametrize("size", [(200, 60), (60, 15), (20, 6)])
async def test_every_size_of_terminal_works(size: tuple[int, int]) -> None:
    """The application works in terminals of every size, and after a resize while a filter is shown."""
    source = mesh()
    async with app_of(source).run_test(size=size) as pilot:
        await settle(pilot, source)
        # The lines above the tables do not scroll.
        await until(pilot, lambda: pilot.app.query_one("#totals").region.y == 1)
        assert pilot.app.screen.max_scroll_y == 0
        await press_for_focus(pilot, "slash", pilot.app.query_one("#filter"))
        await pilot.press("d")
        await pilot.resize_terminal(size[1] * 2, size[0] // 2)
        await settle(pilot, source)
        await until(pilot, lambda: pilot.app.query_one("#filter", Input).value == "d")
        await press_for_focus(pilot, "escape", pilot.app.query_one("#workers"))
        await pilot.press("d")
        await until(pilot, lambda: not pilot.app.current_theme.dark)


def test_it_runs_in_a_terminal_and_ends_with_q(tmp_path: Path) -> None:
    """In a real pseudo-terminal, the application uses the whole screen, ends with `q`, and restores the screen."""
    program = tmp_path / "watch.py"
    program.write_text(
        "from tests.ui.test_top import app_of, mesh\nif __name__ == '__main__':\n    app_of(mesh()).run()\n    print('ended')\n"
    )
    primary, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "COLUMNS": "120", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, str(program)], cwd=ROOT, env=environment, stdin=secondary, stdout=secondary, stderr=secondary,
        start_new_session=True,
    )  # fmt: skip
    os.close(secondary)
    try:
        shown = read_until(primary, "Workers ready")
        assert "\x1b[?1049h" in shown
        assert "\x1b[2J" not in re.sub(r".*\x1b\[\?1049h", "", shown, flags=re.DOTALL).partition("[red]d[/]")[2][:10]
        os.write(primary, b"q")
        assert "\x1b[?1049l" in read_until(primary, "ended")
        assert process.wait(PATIENCE_S) == 0
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(primary)


def read_until(terminal: int, text: str) -> str:
    found = ""
    end = time.monotonic() + PATIENCE_S
    while text not in found:
        assert time.monotonic() < end, found[-2000:]
        ready, _, _ = select.select([terminal], [], [], 0.5)
        if ready:
            try:
                found += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # The other side is closed.
                break
    assert text in found, found[-2000:]
    return found
