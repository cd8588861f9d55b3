"""The application of `kvmesh top`."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar, Protocol

from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from kvmesh.cli.connection import MeshConnection
from kvmesh.cli.explain import render
from kvmesh.cli.top import TopSettings, plain
from kvmesh.cli.top_tables import BAD, DECISIONS, POOLS, REQUESTS, WARN, WORKERS, Column, MeshTable, Record, totals
from kvmesh.discovery.base import ROUTER
from kvmesh.errors import MeshError
from kvmesh.rpc.mesh.rows import WorkerRow, by_name, pool_rows, worker_rows
from kvmesh.rpc.mesh.view import MeshReader, MeshView
from kvmesh.rpc.router.explanations import find_explanation

CANDIDATES_MAX = 20
TABLES: Sequence[tuple[str, str, Sequence[Column]]] = (
    ("workers", "Workers", WORKERS),
    ("pools", "Pools", POOLS),
    ("requests", "Requests", REQUESTS),
    ("planner", "Planner", DECISIONS),
)


class ViewSource(Protocol):
    """Where the application reads."""

    async def read(self) -> MeshView:
        """Raises MeshError."""
        ...

    async def explain(self, request_id: str) -> str:
        """Returns the explanation of a decision as text. Raises MeshError."""
        ...


class MeshSource:
    """Reads a running mesh."""

    def __init__(self, connection: MeshConnection, settings: TopSettings) -> None:
        self._connection = connection
        self._timeout_s = settings.timeout_s
        self._reader = MeshReader(
            connection.registry, connection.channels, timeout_s=settings.timeout_s, requests_max=settings.requests
        )

    async def read(self) -> MeshView:
        return await self._reader.read()

    async def explain(self, request_id: str) -> str:
        routers = (await self._connection.registry.instances(ROUTER)).instances
        found, router_id = await find_explanation(
            routers, self._connection.channels, request_id, timeout_s=self._timeout_s
        )
        return render(found, router_id, CANDIDATES_MAX)


class TextScreen(ModalScreen[None]):
    """A text above the tables, until it is closed."""

    CSS = """
    TextScreen { align: center middle; }
    TextScreen > VerticalScroll { width: 92%; height: auto; max-height: 88%; border: round $primary; padding: 1 2; background: $surface; }
    TextScreen Static { width: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "dismiss", "Close")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """The text is never parsed as markup."""
        lines = "\n".join(map(plain, self._text.splitlines()))
        with VerticalScroll():
            yield Static(Text(lines, no_wrap=True))
        yield Footer()


class TopApp(App[None]):
    """The tables of a mesh."""

    TITLE = "kvmesh top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title { height: 1; padding: 0 1; background: $panel; }
    #totals { height: 1; padding: 0 1; margin: 0; }
    #problem { height: auto; padding: 0 1; display: none; }
    #filter { display: none; height: 3; }
    Screen { overflow: hidden; }
    TabbedContent { height: 1fr; }
    ContentSwitcher { height: 1fr; }
    TabPane { height: 1fr; padding: 0; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit"),
        Binding("1", "view('workers')", "Workers", show=False),
        Binding("2", "view('pools')", "Pools", show=False),
        Binding("3", "view('requests')", "Requests", show=False),
        Binding("4", "view('planner')", "Planner", show=False),
        Binding("1-4", "", "Views", show=True),
        Binding("s", "sort", "Sort by next column"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("enter", "", "Explain request", show=True),
        Binding("space", "read", "Read now"),
        Binding("d", "theme", "Dark/light"),
    ]

    def __init__(self, source: ViewSource, *, title: str, interval_s: float) -> None:
        super().__init__()
        self._source = source
        self._title = plain(title)
        self._interval_s = interval_s
        self._earlier: dict[str, WorkerRow] = {}
        self._wanted = asyncio.Event()
        # Kept, since queries search the screen on top, which may be an explanation.
        self._heading = Static(Text(self._title), id="title")
        self._totals = Static("", id="totals")
        self._problem = Static("", id="problem")
        self._asked = Input(placeholder="words; Enter keeps the filter, Escape removes it", id="filter")
        self._tables = {name: MeshTable(name, columns) for name, _, columns in TABLES}
        self._views = TabbedContent(initial="view-workers")

    def compose(self) -> ComposeResult:
        """One table per view."""
        yield self._heading
        yield self._totals
        yield self._problem
        with self._views:
            for name, title, _ in TABLES:
                with TabPane(title, id=f"view-{name}"):
                    yield self._tables[name]
        yield self._asked
        yield Footer()

    def on_ready(self) -> None:
        """Starts to read, now that there is something to show it on."""
        self._tables["workers"].focus()
        self.run_worker(self._follow(), name="follow")

    async def _follow(self) -> None:
        while True:
            try:
                self._show(await self._source.read())
            except MeshError as error:
                self._show_problems([error.message], BAD)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._wanted.wait()
            self._wanted.clear()

    def _show(self, view: MeshView) -> None:
        rows = worker_rows(view, self._earlier)
        self._earlier = dict(by_name(rows))
        pools = pool_rows(rows, view.plan)
        self._totals.update(totals(view, pools))
        self._show_problems(view.problems, WARN)
        decisions = sorted(view.plan.decisions, key=lambda each: -each.number) if view.plan is not None else []
        records = {
            "workers": [Record(row.name, row) for row in rows],
            "pools": [Record(f"{pool.model}\n{pool.role}", pool) for pool in pools],
            "requests": [Record(request.request_id, request) for request in view.requests.requests],
            "planner": [Record(str(decision.number), decision) for decision in decisions],
        }
        with self.batch_update():
            for name, shown in records.items():
                self._tables[name].show(shown)

    def _show_problems(self, problems: Sequence[str], style: str) -> None:
        self._problem.display = bool(problems)
        self._problem.update(Text("\n".join(map(plain, problems)), style=style))

    @property
    def _table(self) -> MeshTable:
        """The table of the view that is shown."""
        return self._tables[self._views.active.removeprefix("view-")]

    def action_view(self, name: str) -> None:
        """Shows a view."""
        self._views.active = f"view-{name}"
        self._tables[name].focus()

    def action_read(self) -> None:
        """Reads the mesh without waiting for the interval."""
        self._wanted.set()

    def action_sort(self) -> None:
        """Sorts the table by the next column."""
        self._note(f"by {self._table.sort_next()}")

    def action_reverse(self) -> None:
        """Turns the order of the table round."""
        self._table.reverse()

    def action_filter(self) -> None:
        """Asks for words."""
        self._asked.display = True
        self._asked.focus()

    def action_theme(self) -> None:
        """Switches between dark and light."""
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"

    @on(Input.Changed, "#filter")
    def _on_filter(self, event: Input.Changed) -> None:
        self._table.filter(event.value)

    @on(Input.Submitted, "#filter")
    def _on_filtered(self) -> None:
        self._asked.display = False
        self._table.focus()

    def on_key(self, event: events.Key) -> None:
        """Escape removes the filter."""
        if event.key == "escape":
            self._asked.value = ""
            self._asked.display = False
            self._table.filter("")
            self._table.focus()

    @on(DataTable.RowSelected, "#requests")
    async def _on_request(self, event: DataTable.RowSelected) -> None:
        try:
            text = await self._source.explain(str(event.row_key.value))
        except MeshError as error:
            text = error.message
        self.push_screen(TextScreen(text))

    def _note(self, text: str) -> None:
        self._heading.update(Text(f"{self._title}   {text}" if text else self._title))


async def watch(connection: MeshConnection, settings: TopSettings, *, title: str) -> None:
    """Shows a mesh until the user ends the application."""
    source = MeshSource(connection, settings)
    await TopApp(source, title=title, interval_s=settings.interval_s).run_async()
