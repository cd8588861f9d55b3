"""The support matrix is generated from recorded test results only."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import support_matrix
from support_matrix import ROWS, claims, matrix, merged, record_evidence

from kvmesh.engines.registry import ENGINES
from tests import evidence
from tests.conformance.engine_cases import CASES, EngineCase

TESTS = Path(__file__).resolve().parents[2]
SIMULATED = ENGINES["simulated"].capabilities()
KEY = f"simulated {SIMULATED.engine_version}"


def line(feature: str, *, test: str = "tests/a.py::test_a", passed: bool = True) -> str:
    return json.dumps({"feature": feature, "engine": "simulated", "test": test, "passed": passed})


def row_of(page: str, name: str) -> list[str]:
    """Returns the cells of a row of the matrix, by engine."""
    (row,) = [text for text in page.splitlines() if text.startswith(f"| {name} |") and "`" not in text]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_claimed_feature_without_a_passing_test_is_implemented():
    """A claim in a capability record is not a proof."""
    assert row_of(matrix({}), "seed")[4] == "implemented"
    assert row_of(matrix(record_evidence([line("seed")])), "seed")[4] == "verified"


def test_one_failed_test_removes_the_feature():
    assert record_evidence([line("seed"), line("seed", test="tests/a.py::test_b", passed=False)]) == {}


def test_proof_of_another_version_does_not_count():
    """After an upgrade of the engine all features must be proved again."""
    assert row_of(matrix({"simulated 0": {"seed": ["tests/a.py::test_a"]}}), "seed")[4] == "implemented"


def test_a_feature_without_a_row_is_an_error():
    with pytest.raises(ValueError, match="no_such_feature"):
        record_evidence([line("no_such_feature")])


def test_a_feature_that_the_engine_does_not_claim_is_not_proved():
    """A test of an absent feature checks that it is refused."""
    assert record_evidence([line("image")]) == {}


def test_missing_recorded_tests_are_found():
    evidence = {KEY: {"seed": ["tests/unit/scripts/test_support_matrix.py::test_none_such", "tests/none.py::test_a"]}}
    assert len(support_matrix.missing_tests(evidence)) == 2


def test_marks_name_features_of_the_matrix():
    """A misspelt mark would prove nothing."""
    features = {row.feature for row in ROWS}
    marked = [
        feature
        for path in TESTS.rglob("test_*.py")
        for mark in re.findall(r"^\s*@pytest\.mark\.proves\(([^)]*)\)", path.read_text(), re.MULTILINE)
        for feature in re.findall(r'"(\w+)"(?!\s*\))|"(\w+)"', mark.partition("engine=")[0])
    ]
    assert marked
    assert {a or b for a, b in marked} <= features


def test_rows_have_features_that_a_record_can_claim():
    """No engine could claim a misspelt word of a row."""
    words = {row.word for row in ROWS if row.word}
    known = {word for word in words if any(claims(engine.capabilities(), word) for engine in ENGINES.values())}
    assert words - known <= {"image", "audio", "video", "speculative"}


def test_a_stand_in_proves_nothing():
    """The case of TensorRT-LLM in the conformance suite runs without the engine."""
    names = {case.name: case.is_real for param in CASES for case in param.values}
    assert names["trtllm"] is False and names["vllm"] is True
    item = SimpleNamespace(callspec=SimpleNamespace(params={"fleet": EngineCase(name="any", open=None, is_real=False)}))
    assert evidence._runs_stand_in(item)
    item.callspec.params["fleet"] = EngineCase(name="any", open=None)
    assert not evidence._runs_stand_in(item)


def test_a_record_of_some_tests_is_merged() -> None:
    """Merging removes nothing and lists each test once."""
    before = {"a 1": {"seed": ["t::x"], "lora": ["t::y"]}, "b 1": {"seed": ["t::z"]}}
    found = {"a 1": {"seed": ["t::w", "t::x"]}, "c 1": {"lora": ["t::v"]}}
    assert merged(before, found) == {
        "a 1": {"lora": ["t::y"], "seed": ["t::w", "t::x"]},
        "b 1": {"seed": ["t::z"]},
        "c 1": {"lora": ["t::v"]},
    }
