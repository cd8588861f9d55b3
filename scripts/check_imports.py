"""Checks the import contracts of `importlinter.toml`. Skips modules that its list `awaited` marks as not written yet.

Fails if a contract names a missing module that is not in the list: otherwise a renamed module would no longer be checked. Also fails if a module
in the list exists, because its contracts must apply to it.
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
    """Returns the exit status of the import linter, or 1 if the list of awaited modules is wrong."""
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
    """Returns the errors in the list of awaited modules."""
    landed = [f"{name} exists: remove it from `awaited`" for name in sorted(awaited & present)]
    lost = [f"{name} is named but does not exist" for name in sorted(named - awaited - present)]
    idle = [f"{name} is awaited, but no contract names it" for name in sorted(awaited - named)]
    return landed + lost + idle


def names_in(contract: Contract) -> set[str]:
    """Returns the full names of the modules that a contract names, without patterns."""
    return {name for key in NAMES for entry in contract.get(key, []) for name in full_names(contract, entry)}


def full_names(contract: Contract, entry: str) -> list[str]:
    """Returns the modules of one entry. A layer may have several, with names relative to its container."""
    prefix = f"{contract['containers'][0]}." if "containers" in contract else ""
    return [prefix + name.strip() for name in entry.split("|") if "*" not in name]


def limited_to(contract: Contract, present: set[str]) -> Contract | None:
    """Returns the contract without missing modules; None if it has no modules to check."""
    limited = dict(contract)
    for key in NAMES:
        if key in contract and key != "forbidden_modules":
            entries = (limited_entry(contract, entry, present) for entry in contract[key])
            limited[key] = [entry for entry in entries if entry]
    guarded = [key for key in ("source_modules", "protected_modules") if key in limited]
    return None if any(not limited[key] for key in guarded) else limited


def limited_entry(contract: Contract, entry: str, present: set[str]) -> str:
    """Returns the existing modules of an entry."""
    if "*" in entry:
        return entry
    words = [word.strip() for word in entry.split("|")]
    return " | ".join(word for word in words if full_names(contract, word)[0] in present)


def run(roots: list[str], contracts: list[Contract]) -> int:
    """Runs the import linter on the contracts as an INI file, because the standard library cannot write TOML."""
    parser = ConfigParser(interpolation=None)
    parser["importlinter"] = {"root_packages": lines(roots), "include_external_packages": "True"}
    for number, contract in enumerate(contracts):
        parser[f"importlinter:contract:{number}"] = {key: lines(value) for key, value in contract.items()}
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as config:
        parser.write(config)
        config.flush()
        return int(lint_imports(config_filename=config.name, no_cache=True))


def lines(value: Any) -> str:
    """Returns an INI value: one line per element of a list."""
    return "\n" + "\n".join(value) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
