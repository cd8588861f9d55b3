"""Writes generated files of compose/: Grafana's dashboards, and Prometheus' configuration for compose.yaml. `--check` compares instead."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dashboard_panels import DASHBOARDS, Dashboard, Panel

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "compose"
PAGE_WIDTH = 24
HEIGHTS = {"stat": 4, "timeseries": 8}
SOURCE = {"type": "prometheus", "uid": "prometheus"}
"""The data source of compose/grafana/provisioning."""
HOST_ADDRESS, STACK_ADDRESS = '"127.0.0.1:8500"', '"consul:8500"'


def main() -> int:
    """Writes the files. With `--check`, returns 1 if one is out of date."""
    wanted = {COMPOSE / "grafana" / "dashboards" / f"{each.name}.json": dashboard_text(each) for each in DASHBOARDS}
    wanted[COMPOSE / "prometheus" / "compose.yml"] = prometheus_text()
    if "--check" not in sys.argv[1:]:
        for path, text in wanted.items():
            path.write_text(text)
        return 0
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date; run python scripts/compose_files.py", file=sys.stderr)
    return 1 if stale else 0


def prometheus_text() -> str:
    """Returns prometheus.yml with Consul's address in the Compose stack, because Prometheus expands no variables there."""
    text = (COMPOSE / "prometheus" / "prometheus.yml").read_text()
    if text.count(HOST_ADDRESS) != 1:
        raise ValueError(f"prometheus.yml must contain {HOST_ADDRESS} once")
    note = "# Written by scripts/compose_files.py from prometheus.yml, for compose.yaml.\n"
    return note + text.replace(HOST_ADDRESS, STACK_ADDRESS)


def dashboard_text(dashboard: Dashboard) -> str:
    """Returns the JSON of a dashboard, which Grafana loads from its provisioning folder."""
    return json.dumps(dashboard_json(dashboard), indent=2) + "\n"


def dashboard_json(dashboard: Dashboard) -> Mapping[str, Any]:
    """Returns a dashboard in Grafana's JSON model, with its panels from left to right and from top to bottom."""
    panels, x, y, row_height = [], 0, 0, 0
    for number, panel in enumerate(dashboard.panels, 1):
        if x + panel.width > PAGE_WIDTH:
            x, y, row_height = 0, y + row_height, 0
        height = HEIGHTS[panel.kind]
        place = {"h": height, "w": panel.width, "x": x, "y": y}
        panels.append(panel_json(panel, number, place))
        x, row_height = x + panel.width, max(row_height, height)
    return {
        "uid": f"kvmesh-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["kvmesh"],
        "timezone": "browser",
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": []},
        "annotations": {"list": []},
        "links": [{"title": "kvmesh", "type": "dashboards", "tags": ["kvmesh"], "asDropdown": False}],
        "panels": panels,
    }


def panel_json(panel: Panel, number: int, place: Mapping[str, int]) -> Mapping[str, Any]:
    """Returns a panel in Grafana's JSON model."""
    is_stat = panel.kind == "stat"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": query,
            "legendFormat": legend,
            "instant": is_stat,
        }
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    if not is_stat:
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


if __name__ == "__main__":
    sys.exit(main())
