"""Samples memory, descriptors and tasks of the processes of a mesh over time, and computes their slopes."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvmesh.discovery.base import DECODE, FRONTEND, PREFILL, ROUTER
from tests.chaos.processes import ProcessMesh

SERVICES = (FRONTEND, ROUTER, PREFILL, DECODE)
TASKS = "event_loop_tasks"
WARM_UP_SHARE = 0.5
"""Part of the run that slopes leave out, in which caches fill and allocators grow to the size that the load needs."""
ERRORS = 3.0
"""A slope within this many standard errors may be chance."""
KINDS = {"memory MiB": 12.0, "descriptors": 6.0, "tasks": 6.0}
"""The sampled values, and the growth over a whole run that is allowed: an allocator's step, or a few connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Change per hour with its standard error, and the growth over the sampled time."""

    per_hour: float
    error: float
    growth: float

    def is_flat(self, allowed: float) -> bool:
        """Returns whether the slope may be chance, or the growth is within the allowed amount."""
        return self.per_hour <= ERRORS * self.error or self.growth <= allowed


@dataclass(slots=True)
class Samples:
    """Pairs of seconds and value, by process and kind."""

    series: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=dict)

    async def take(self, mesh: ProcessMesh, names: Sequence[str]) -> None:
        """Samples these processes. Omits a process that does not answer."""
        tasks = await event_loop_tasks(mesh)
        now_s = time.monotonic()
        for name in names:
            child = mesh.children.get(name)
            if child is None:
                continue
            with suppress(OSError, ValueError):
                self._add(name, "memory MiB", now_s, resident_bytes(child.pid) / 2**20)
                self._add(name, "descriptors", now_s, len(os.listdir(f"/proc/{child.pid}/fd")))
            if child.pid in tasks:
                self._add(name, "tasks", now_s, tasks[child.pid])

    def _add(self, name: str, kind: str, at_s: float, value: float) -> None:
        self.series.setdefault((name, kind), []).append((at_s, value))

    def slopes(self) -> dict[tuple[str, str], Slope]:
        """Returns the slopes without the warm-up. Omits series of fewer than four samples."""
        return {key: slope for key, points in self.series.items() if (slope := slope_of(points)) is not None}


def slope_of(points: Sequence[tuple[float, float]]) -> Slope | None:
    """Fits a line by least squares to the points after the warm-up."""
    if len(points) < 2:
        return None
    begin_s = points[0][0] + WARM_UP_SHARE * (points[-1][0] - points[0][0])
    kept = [point for point in points if point[0] >= begin_s]
    count = len(kept)
    if count < 4:
        return None
    mean_x, mean_y = sum(x for x, _ in kept) / count, sum(y for _, y in kept) / count
    spread = sum((x - mean_x) ** 2 for x, _ in kept)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in kept) / spread
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in kept)
    error = (left / (count - 2) / spread) ** 0.5
    return Slope(per_hour=3600 * slope, error=3600 * error, growth=slope * (kept[-1][0] - kept[0][0]))


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def metrics_of(mesh: ProcessMesh) -> Mapping[int, str]:
    """Returns the metrics of each process that answers, by process id."""
    found: dict[int, str] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
        for service in SERVICES:
            for each in (await mesh.registry.instances(service)).instances:
                with suppress(aiohttp.ClientError, TimeoutError, KeyError):
                    url = f"http://{each.host}:{each.meta['metrics_port']}/metrics"
                    async with session.get(url) as response:
                        found[int(each.instance_id.rpartition("-")[2])] = await response.text()
    return found


async def event_loop_tasks(mesh: ProcessMesh) -> dict[int, float]:
    """Returns the number of event-loop tasks of each process."""
    return {pid: total(text, TASKS) for pid, text in (await metrics_of(mesh)).items()}


def total(text: str, name: str) -> float:
    """Returns the sum of a metric over its labels, for any service's prefix."""
    lines = (line for line in text.splitlines() if line.startswith("kvmesh_"))
    parts = (line.rpartition(" ") for line in lines)
    return sum(float(value) for key, _, value in parts if key.partition("{")[0].endswith(f"_{name}"))
