"""Run the import contracts of `importlinter.toml`, without the modules that are listed there as not written yet.

A named module that is missing and not listed is an error, and so is a listed one that has landed: a contract must not
stop guarding because something was renamed, and must start to guard when its module arrives.
"""

import sys
import tempfile
import tomllib
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import grimp
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "importlinter.toml"
# Keys of a contract that hold module names.
NAMES = ("modules", "source_modules", "forbidden_modules", "protected_modules", "allowed_importers", "layers")

Contract = dict[str, Any]


def main() -> int:
    """The exit status of the import linter, or 1 when the list of awaited modules is not right."""
    sys.path.insert(0, str(ROOT))
    settings = tomllib.loads(CONFIG.read_text())["tool"]
    roots = settings["importlinter"]["root_packages"]
    present = grimp.build_graph(*roots, include_external_packages=True, cache_dir=None).modules
    contracts, awaited = settings["importlinter"]["contracts"], set(settings["kvmesh"]["awaited"])
    own = {name for contract in contracts for name in names_in(contract) if name.split(".")[0] in roots}
    problems = list_problems(own, awaited, present)
    for problem in problems:
        print(f"importlinter.toml: {problem}")
    runnable = [kept for contract in contracts if (kept := limited_to(contract, present))]
    return run(roots, runnable) or bool(problems)


def list_problems(named: set[str], awaited: set[str], present: set[str]) -> list[str]:
    """What is wrong with the list of awaited modules."""
    landed = [f"{name} has landed: take it off `awaited`" for name in sorted(awaited & present)]
    lost = [f"{name} is named but does not exist" for name in sorted(named - awaited - present)]
    idle = [f"{name} is awaited, but no contract names it" for name in sorted(awaited - named)]
    return landed + lost + idle


def names_in(contract: Contract) -> set[str]:
    """Full names of the modules that a contract names, patterns aside."""
    return {name for key in NAMES for entry in contract.get(key, []) for name in full_names(contract, entry)}


def full_names(contract: Contract, entry: str) -> list[str]:
    """The modules of one entry; a layer may hold several, and is named relative to its container."""
    prefix = f"{contract['containers'][0]}." if "containers" in contract else ""
    return [prefix + name.strip() for name in entry.split("|") if "*" not in name]


def limited_to(contract: Contract, present: set[str]) -> Contract | None:
    """The contract without modules that are not there; None when nothing is left that it could guard."""
    limited = dict(contract)
    for key in NAMES:
        if key in contract and key != "forbidden_modules":
            entries = (limited_entry(contract, entry, present) for entry in contract[key])
            limited[key] = [entry for entry in entries if entry]
    guarded = [key for key in ("source_modules", "protected_modules") if key in limited]
    return None if any(not limited[key] for key in guarded) else limited


def limited_entry(contract: Contract, entry: str, present: set[str]) -> str:
    """The part of an entry that is there."""
    if "*" in entry:
        return entry
    words = [word.strip() for word in entry.split("|")]
    return " | ".join(word for word in words if full_names(contract, word)[0] in present)


def run(roots: list[str], contracts: list[Contract]) -> int:
    """Hand the contracts to the import linter, in the format that the standard library can write."""
    parser = ConfigParser(interpolation=None)
    parser["importlinter"] = {"root_packages": lines(roots), "include_external_packages": "True"}
    for number, contract in enumerate(contracts):
        parser[f"importlinter:contract:{number}"] = {key: lines(value) for key, value in contract.items()}
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as config:
        parser.write(config)
        config.flush()
        return int(lint_imports(config_filename=config.name, no_cache=True))


def lines(value: Any) -> str:
    """A value in that format: one line for each element of a list."""
    return "\n" + "\n".join(value) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
