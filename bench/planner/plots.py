"""Plots of the comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # The backend must be chosen before this import, because there is no display.
from matplotlib.axes import Axes

# Makes the output reproducible: no random ids, and text as text.
matplotlib.rcParams.update({"svg.hashsalt": "kvmesh", "svg.fonttype": "none", "font.size": 8})

COLUMNS = 4
INTERVAL_S = 10.0
MARKERS = "osD^vPX*<>"
Figures = Mapping[str, Any]


def plot(figures: Sequence[Figures], folder: Path) -> None:
    """Writes `planner.svg`, with worker-hours relative to those of the oracle and the share of requests within the targets, and
    `planner-workers.svg`, with the load and the workers that the planner and the oracle want. Each load has a panel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _panels(figures, folder / "planner.svg", _outcomes)
    _panels(figures, folder / "planner-workers.svg", _workers)


def _panels(figures: Sequence[Figures], path: Path, draw: Any) -> None:
    loads = list(dict.fromkeys(figure["load"] for figure in figures))
    rows = -(-len(loads) // COLUMNS)
    sheet, axes = pyplot.subplots(rows, COLUMNS, figsize=(13, 3 * rows), squeeze=False, layout="constrained")
    for axis, load in zip(axes.flat, loads, strict=False):
        axis.set_title(load, fontsize=9)
        draw(axis, [run for run in figures if run["load"] == load])
    for axis in list(axes.flat)[len(loads) :]:
        axis.set_visible(False)
    if axes.flat[0].get_legend_handles_labels()[0]:
        axes.flat[0].legend(fontsize=6)
    sheet.savefig(path, metadata={"Date": None})
    # matplotlib ends some lines with spaces, which git's checks refuse.
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
    pyplot.close(sheet)


def _outcomes(axis: Axes, runs: Sequence[Figures]) -> None:
    base = next((run["worker_hours"] for run in runs if run["policy"] == "oracle"), 1.0)
    for run, marker in zip(runs, MARKERS, strict=False):
        axis.plot(run["worker_hours"] / base, 100 * run["attainment"], marker, label=run["policy"])
    axis.axhline(95, color="grey", linewidth=0.5)
    axis.axvline(1.1, color="grey", linewidth=0.5)
    axis.set_xlabel("worker-hours, of the oracle's")
    axis.set_ylabel("within targets, %")


def _workers(axis: Axes, runs: Sequence[Figures]) -> None:
    arrivals = runs[0]["arrivals"]
    axis.fill_between([i * INTERVAL_S for i in range(len(arrivals))], arrivals, step="post", color="0.9")
    axis.set_xlabel("seconds")
    axis.set_ylabel("requests/s (grey)")
    workers = axis.twinx()
    workers.set_ylabel("workers wanted")
    for name in ("planner", "oracle"):
        for run in (each for each in runs if each["policy"] == name):
            shapes = [*run["shapes"], [run["duration_s"], *run["shapes"][-1][1:]]]
            sizes = [prefill + decode for _, prefill, decode in shapes]
            workers.step([shape[0] for shape in shapes], sizes, where="post", linewidth=0.9, label=name)
    workers.set_ylim(bottom=0)
    workers.legend(fontsize=6)
