"""Every event that the product logs reaches the log with its data."""

import ast
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from kvmesh.telemetry.logging import JsonFormatter
from tests.parts import ROOT

SETTINGS = "kvmesh/settings/load.py"
"""Logs before logs have a format."""
UNSEEN = ("kvmesh/simulation/",)
"""Only tests and benchmarks run it."""
PAGE = ROOT / "docs" / "operate" / "logs.md"
SOURCES = sorted(path for folder in ("kvmesh", "services") for path in (ROOT / folder).rglob("*.py"))


def calls(path: Path) -> Iterator[ast.Call]:
    """Calls of the methods of `_log`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "_log":
                yield node


def test_no_event_has_data_that_its_line_would_lose() -> None:
    """A key of the line itself hides an event's key of the same name."""
    found = [(path, call) for path in SOURCES for call in calls(path)]
    assert len(found) > 100
    own = json.loads(JsonFormatter("").format(logging.makeLogRecord({"msg": "event"})))
    hidden = {*own, "trace_id", "span_id", "extra"}
    assert "service" in hidden
    for path, call in found:
        keys = {keyword.arg for keyword in call.keywords}
        assert not keys & hidden, f"{path}:{call.lineno}"


def test_modules_log_events() -> None:
    """A logger of the standard library would accept data that the formatter does not print."""
    loggers = [path for path in SOURCES if "getLogger(__name__)" in path.read_text()]
    assert [str(path.relative_to(ROOT)) for path in loggers] == [SETTINGS]


def test_the_page_names_each_warning_and_error() -> None:
    """And no event that is not logged."""
    logged = {
        call.args[0].value: call.func.attr
        for path in SOURCES
        if not str(path.relative_to(ROOT)).startswith(UNSEEN)
        for call in calls(path)
        if isinstance(call.args[0], ast.Constant)
    }
    health = {"breaker_opened", "path_opened", "worker_wedged", "overlap_impossible"}
    assert all(f'"{event}"' in (ROOT / "services/router/health/monitor.py").read_text() for event in health)
    found = {
        event
        for line in PAGE.read_text().partition("## Warnings")[2].splitlines()
        for event in re.findall(r"`([a-z_]+)`", line.partition("|")[2].partition("|")[0])
    }
    levels = {"warning", "error", "critical"}
    assert {event for event, level in logged.items() if level in levels} - found == set()
    assert found - set(logged) - health - {"reason"} == set()
