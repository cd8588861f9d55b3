"""Plots of a replay's figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # The backend must be chosen before this import, because there is no display.


def plot(figures: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Writes `replay-ttft.png`, the distribution of TTFT per policy, and `replay-hits.png`, the hit rates. Each trace, fleet and load has a
    panel."""
    folder.mkdir(parents=True, exist_ok=True)
    panels: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for figure in figures:
        panels.setdefault((figure["trace"], figure["workers"], figure["load"]), []).append(figure)
    columns = 2
    rows = -(-len(panels) // columns)
    for name, draw in (("ttft", _ttft), ("hits", _hits)):
        sheet, axes = pyplot.subplots(rows, columns, figsize=(10, 2.6 * rows), squeeze=False, layout="constrained")
        for axis, (title, runs) in zip(axes.flat, panels.items(), strict=False):
            draw(axis, runs)
            axis.set_title("{} trace, {} workers, load {}".format(*title), fontsize=9)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        sheet.savefig(folder / f"replay-{name}.png", dpi=80)
        pyplot.close(sheet)


def _ttft(axis: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    for run in runs:
        values = run["ttft_s"]
        axis.plot(values, [i / len(values) for i in range(len(values))], label=run["policy"])
    axis.set_xscale("log")
    axis.set_xlabel("TTFT, s")
    axis.set_ylabel("share of requests")
    axis.legend(fontsize=7)


def _hits(axis: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    axis.bar([run["policy"] for run in runs], [float(run["hit rate"]) for run in runs])
    axis.set_ylabel("hit rate")
