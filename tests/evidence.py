"""Records the engine features that a test run has proved. `scripts/support_matrix.py` generates the matrix from the record.

A test names the features that it proves: `@pytest.mark.proves("logprobs")`. The engine is that of its EngineCase, or `engine=...` of the mark.
If the variable KVMESH_EVIDENCE is set, each passed or failed test with this mark adds a line to that file. The processes of one run share the
file.
"""

import json
import os
from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Adds the line after the call phase, not after the set-up. A skipped test proves nothing."""
    report = yield
    path = os.environ.get("KVMESH_EVIDENCE")
    if path and (report.when == "call" or report.failed) and report.outcome != "skipped" and not _runs_stand_in(item):
        for mark in item.iter_markers("proves"):
            for feature in mark.args:
                _add(path, feature, mark.kwargs.get("engine") or _engine(item), item, passed=report.passed)
    return report


def _add(path: str, feature: str, engine: str, item: pytest.Item, *, passed: bool) -> None:
    test = item.nodeid.partition("[")[0]
    line = json.dumps({"feature": feature, "engine": engine, "test": test, "passed": passed})
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(f"{line}\n")


def _engine(item: pytest.Item) -> str:
    """Returns the engine of the test's case. A mark on a test without a case needs `engine`."""
    (case,) = _cases(item)
    return str(case.name)


def _runs_stand_in(item: pytest.Item) -> bool:
    """Returns whether the test uses a stand-in for the engine. Such a test checks the adapter and proves nothing about the engine."""
    return any(not case.is_real for case in _cases(item))


def _cases(item: pytest.Item) -> list[Any]:
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [value for value in values if type(value).__name__ == "EngineCase"]
