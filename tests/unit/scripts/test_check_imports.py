from typing import Any

from check_imports import limited_to, list_problems

LAYERS: dict[str, Any] = {"type": "layers", "containers": ["kvmesh"], "layers": ["cli", "engines | rpc", "core"]}
DECISIONS: dict[str, Any] = {"type": "forbidden", "source_modules": ["a.place"], "forbidden_modules": ["grpc"]}


def test_an_existing_module_must_not_be_awaited() -> None:
    """Otherwise the contract would ignore the module for which it was written."""
    assert list_problems({"a.place"}, {"a.place"}, {"a.place"}) == ["a.place exists: remove it from `awaited`"]


def test_a_missing_module_is_a_problem() -> None:
    """A renamed module must not drop out of its contract."""
    assert list_problems({"a.place"}, set(), set()) == ["a.place is named but does not exist"]


def test_layers_keep_existing_modules() -> None:
    """A layer of which one module is missing still constrains the others."""
    limited = limited_to(LAYERS, {"kvmesh.cli", "kvmesh.rpc"})
    assert limited is not None
    assert limited["layers"] == ["cli", "rpc"]


def test_a_contract_without_modules_is_skipped() -> None:
    """The import linter refuses a contract whose modules do not exist."""
    assert limited_to(DECISIONS, {"grpc"}) is None
    assert limited_to(DECISIONS, {"a.place"}) == DECISIONS
