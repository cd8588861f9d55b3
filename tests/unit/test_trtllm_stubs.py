"""The stand-in of TensorRT-LLM has the signatures of the type stubs, against which mypy checks the adapter.

A call that is missing in the stubs, or has other parameters, therefore fails mypy or the tests.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.trtllm_case import fake_tensorrt_llm

TYPINGS = Path(__file__).resolve().parents[2] / "typings"
STUBS = sorted((TYPINGS / "tensorrt_llm").rglob("*.pyi"))
IMPLICIT = {"__init__", "__aiter__"}
Parameter = tuple[str, str, Any]


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with fake_tensorrt_llm():
        yield


def stub_parameters(function: ast.FunctionDef) -> list[Parameter]:
    """Returns name, kind and default of each parameter except `self`."""
    arguments, none = function.args, inspect.Parameter.empty
    plain = arguments.args
    defaults = [none] * (len(plain) - len(arguments.defaults)) + [ast.literal_eval(each) for each in arguments.defaults]
    found = [(each.arg, "POSITIONAL_OR_KEYWORD", value) for each, value in zip(plain, defaults, strict=True)]
    for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((each.arg, "KEYWORD_ONLY", none if value is None else ast.literal_eval(value)))
    if arguments.kwarg is not None:
        found.append((arguments.kwarg.arg, "VAR_KEYWORD", none))
    return found[1:]


def fake_parameters(function: Any) -> list[Parameter]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind.name, each.default) for each in found][1:]


def check_class(stub: ast.ClassDef, found: type) -> list[str]:
    """Returns the differences between a stub and the class of the stand-in."""
    wrong = []
    members = {each.name for each in stub.body if isinstance(each, ast.FunctionDef)}
    for each in stub.body:
        if isinstance(each, ast.FunctionDef):
            member = inspect.getattr_static(found, each.name, None)
            if member is None:
                wrong.append(f"{stub.name}.{each.name} is missing")
            elif not isinstance(member, property) and stub_parameters(each) != fake_parameters(member):
                wrong.append(f"{stub.name}.{each.name} has other parameters")
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            members.add(each.target.id)
            known = {name for base in found.__mro__ for name in inspect.get_annotations(base)}
            if each.target.id not in known:
                wrong.append(f"{stub.name}.{each.target.id} is missing")
        elif isinstance(each, ast.Assign):
            (target,) = each.targets
            assert isinstance(target, ast.Name)
            members.add(target.id)
            if getattr(found, target.id, None) != ast.literal_eval(each.value):
                wrong.append(f"{stub.name}.{target.id} differs")
    has_init = any(isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in stub.body)
    parameters = set(inspect.signature(found).parameters) if has_init else set()
    extra = {name for name in vars(found) if not name.startswith("_")} - members - parameters
    return wrong + [f"{stub.name}.{name} is not in the stub" for name in sorted(extra)]


@pytest.mark.parametrize("path", STUBS, ids=lambda path: str(path.relative_to(TYPINGS)))
def test_the_stand_in_has_the_signatures_of_the_stubs(path: Path) -> None:
    """Classes, methods, parameters, kinds and defaults match in both directions."""
    name = ".".join(path.relative_to(TYPINGS).with_suffix("").parts).removesuffix(".__init__")
    module, wrong = importlib.import_module(name), []
    for each in ast.parse(path.read_text()).body:
        if isinstance(each, ast.ClassDef):
            wrong += check_class(each, getattr(module, each.name))
        elif isinstance(each, ast.ImportFrom):
            wrong += [
                f"{alias.asname} is missing"
                for alias in each.names
                if alias.asname and not hasattr(module, alias.asname)
            ]
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            assert hasattr(module, each.target.id)
    assert wrong == []


def test_differences_are_found() -> None:
    """The comparison finds a renamed parameter, another default, and a method that is not in the stub."""
    stub = ast.parse("class Some:\n    def go(self, a: int, b: int = 2) -> None: ...\n").body[0]
    assert isinstance(stub, ast.ClassDef)

    class Renamed:
        def go(self, a: int, c: int = 2) -> None: ...

    class Changed:
        def go(self, a: int, b: int = 3) -> None: ...

    class More:
        def go(self, a: int, b: int = 2) -> None: ...

        def stop(self) -> None: ...

    assert check_class(stub, Renamed) == check_class(stub, Changed) == ["Some.go has other parameters"]
    assert check_class(stub, More) == ["Some.stop is not in the stub"]


@pytest.mark.parametrize("path", STUBS, ids=lambda path: str(path.relative_to(TYPINGS)))
def test_every_signature_has_an_origin(path: Path) -> None:
    """The comment before each class names the file from which its signature was read."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("class "):
            before = number - 1
            while before > 0 and lines[before].startswith("#") and "Origin:" not in lines[before]:
                before -= 1
            assert "Origin:" in lines[before], line
