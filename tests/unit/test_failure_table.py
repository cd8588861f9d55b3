"""Every row of the table of failures in docs/operate/reliability.md names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operate" / "reliability.md"
HEADING = "## What fails, and what the client sees"
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def rows() -> list[list[str]]:
    """Returns the cells of each row below the header."""
    section = PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0]
    lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


@cache
def names_in(path: str) -> frozenset[str]:
    """Returns the names of a file's tests."""
    tree = ast.parse((ROOT / path).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_the_table_is_found() -> None:
    """An empty table would make the test below pass without a check."""
    assert len(rows()) > 15


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_each_failure_names_a_test_that_exists(row: list[str]) -> None:
    """A row names a test function, or a file that contains tests."""
    assert len(row) == 4, row
    named = TEST.findall(row[3])
    assert named, f"no test proves this row: {row[0]}"
    for path, name in named:
        found = names_in(path)
        assert name in found if name else found, f"{path}::{name}"
