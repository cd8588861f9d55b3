from typing import Any

from check_imports import limited_to, list_problems

LAYERS: dict[str, Any] = {"type": "layers", "containers": ["kvmesh"], "layers": ["cli", "engines | rpc", "core"]}
DECISIONS: dict[str, Any] = {"type": "forbidden", "source_modules": ["a.place"], "forbidden_modules": ["grpc"]}


def test_a_module_that_landed_must_leave_the_list() -> None:
    """Otherwise a contract would go on without the module that it was written for."""
    assert list_problems({"a.place"}, {"a.place"}, {"a.place"}) == ["a.place has landed: take it off `awaited`"]


def test_a_named_module_that_vanished_is_a_problem() -> None:
    """A renamed module must not slip out of its contract."""
    assert list_problems({"a.place"}, set(), set()) == ["a.place is named but does not exist"]


def test_layers_keep_what_is_there() -> None:
    """A layer of which one part is missing guards the other."""
    limited = limited_to(LAYERS, {"kvmesh.cli", "kvmesh.rpc"})
    assert limited is not None
    assert limited["layers"] == ["cli", "rpc"]


def test_a_contract_without_anything_to_guard_is_left_out() -> None:
    """The import linter refuses to run a contract whose modules do not exist."""
    assert limited_to(DECISIONS, {"grpc"}) is None
    assert limited_to(DECISIONS, {"a.place"}) == DECISIONS
