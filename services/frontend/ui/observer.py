"""Reads the mesh for all viewers of /ui together: one reading per interval, and none without a viewer."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from kvmesh.clock import Clock
from kvmesh.errors import MeshError, OverloadedError, UnavailableError
from kvmesh.event_log import event_logger
from kvmesh.rpc.mesh.rows import WorkerRow, by_name, worker_rows
from kvmesh.rpc.mesh.view import MeshView
from kvmesh.telemetry import Instruments
from services.frontend.ui.encode import mesh_json

_log = event_logger(__name__)
INTERVAL_S = 1.0
"""Time between two readings of the mesh: every router and the planner are asked for each, and people read no faster."""
READ_TIMEOUT_S = 2.0
"""Longest wait for a router or planner. One that does not answer is a problem that the page shows."""
REQUESTS_MAX = 128
"""The newest requests that the page lists."""
VIEWERS_MAX = 16
"""Each viewer gets the whole list once per interval, from the event loop that serves requests. More are refused with Retry-After."""


class Reads(Protocol):
    """Reads a mesh; see `MeshReader`."""

    async def read(self) -> MeshView:
        """Raises MeshError if the registry cannot be read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One reading as a server-sent event. Numbers count up."""

    number: int
    event: bytes


class MeshObserver:
    """A running part. Invariants:

    1. The mesh is read at most once per `INTERVAL_S`, however many viewers there are, and not at all without viewers.
    2. A viewer gets the newest reading. It skips those that came while it was slow, so nothing is buffered for it.
    """

    def __init__(self, reader: Reads, clock: Clock, *, frontend_id: str, instruments: Instruments) -> None:
        self._reader = reader
        self._clock = clock
        self._frontend_id = frontend_id
        self._viewers = 0
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._frame: Frame | None = None
        self._readings = 0
        self._earlier: dict[str, WorkerRow] = {}
        self._is_closed = False
        instruments.gauge_function("ui_viewers", help="Viewers of /ui.", function=lambda: self._viewers)

    async def start(self) -> None:
        """Does nothing."""

    async def run(self) -> None:
        """Reads the mesh while there are viewers, until cancelled."""
        while not self._is_closed:
            await self._wanted.wait()
            self._publish(await self._read())
            await self._clock.sleep(INTERVAL_S)

    async def aclose(self) -> None:
        """Ends the streams of all viewers."""
        self._is_closed = True
        self._wake()

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Counts a viewer. Raises OverloadedError if there are too many."""
        if self._viewers >= VIEWERS_MAX:
            raise OverloadedError(
                f"{self._viewers} viewers are already connected", reason="viewers_full", retry_after_s=10.0
            )
        self._viewers += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._wanted.clear()
                # What the next viewer gets must be new.
                self._frame = None
                self._earlier = {}

    async def next(self, after: int) -> Frame:
        """Waits for a reading with a larger number. Raises UnavailableError when the frontend stops."""
        while not self._is_closed:
            if self._frame is not None and self._frame.number > after:
                return self._frame
            await self._changed.wait()
        raise UnavailableError("the frontend is stopping", reason="draining")

    async def _read(self) -> dict[str, Any]:
        try:
            view = await self._reader.read()
        except MeshError as error:
            return {"error": error.message}
        except Exception as error:  # noqa: BLE001 (a defect of the page must not end the frontend; logged)
            _log.error("mesh_not_read", exc_info=error)
            return {"error": "the mesh cannot be read; the frontend's log says why"}
        rows = worker_rows(view, self._earlier)
        self._earlier = dict(by_name(rows))
        return mesh_json(view, rows)

    def _publish(self, mesh: dict[str, Any]) -> None:
        if not self._viewers:
            return
        self._readings += 1
        body = {
            "number": self._readings,
            "at": self._clock.wall(),
            "interval_s": INTERVAL_S,
            "frontend": self._frontend_id,
            **mesh,
        }
        self._frame = Frame(number=self._readings, event=b"event: mesh\ndata: " + orjson.dumps(body) + b"\n\n")
        self._wake()

    def _wake(self) -> None:
        """Wakes those that wait now; a wait that starts later needs the new event."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
