"""Plots of the comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # The backend is chosen first: there is no screen.


def plot(figures: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """`planner.png`: worker-hours over those of the oracle, and share of requests within the targets, one panel per load."""
    folder.mkdir(parents=True, exist_ok=True)
    loads = list(dict.fromkeys(figure["load"] for figure in figures))
    columns = 4
    rows = -(-len(loads) // columns)
    sheet, axes = pyplot.subplots(rows, columns, figsize=(13, 3 * rows), squeeze=False, layout="constrained")
    for axis, load in zip(axes.flat, loads, strict=False):
        runs = [figure for figure in figures if figure["load"] == load]
        base = next((run["worker_hours"] for run in runs if run["policy"] == "oracle"), 1.0)
        for run in runs:
            axis.plot(run["worker_hours"] / base, 100 * run["attainment"], "o", label=run["policy"])
        axis.axhline(95, color="grey", linewidth=0.5)
        axis.axvline(1.1, color="grey", linewidth=0.5)
        axis.set_title(load, fontsize=9)
        axis.set_xlabel("worker-hours, of the oracle's", fontsize=8)
        axis.set_ylabel("within targets, %", fontsize=8)
    for axis in list(axes.flat)[len(loads) :]:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=6)
    sheet.savefig(folder / "planner.png", dpi=80)
    pyplot.close(sheet)
