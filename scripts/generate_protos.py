"""Generates the Python code of the contracts: `protos/**/*.proto` to `kvmesh/api/`.

`--check` writes into a temporary folder and fails if the result differs from the committed code. The output depends only on the
protos and on the pinned grpcio-tools.
"""

import argparse
import filecmp
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
API = ROOT / "kvmesh" / "api"

# protoc names a module after the proto's folder, `kvmesh.<area>.v1`. The code lives below `kvmesh.api`, so that the contracts' packages and the
# library's own modules cannot collide.
_IMPORT = re.compile(r"^from (kvmesh|inference|externalscaler)((?:\.\w+)*) import (\w+_pb2)", re.MULTILINE)
_MODULE_NAME = re.compile(r"(BuildTopDescriptorsAndMessages\(DESCRIPTOR, ')(kvmesh|inference|externalscaler)\.")
_INIT = '"""Generated from protos/ by scripts/generate_protos.py; do not edit."""\n'


def main() -> int:
    """Generates or checks. Returns 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the committed code differs")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "api"
        generate(fresh)
        if check:
            return report(sorted(differences(fresh, API)))
        shutil.rmtree(API, ignore_errors=True)
        shutil.copytree(fresh, API)
    return 0


def generate(into: Path) -> None:
    """Writes the package `kvmesh.api` into a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder)
        run_protoc(raw)
        for source in sorted(path for path in raw.rglob("*") if path.is_file() and not serves_nothing(path)):
            target = into / package_path(source.relative_to(raw))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(rewritten(source.read_text()))
    for package in sorted({into, *(path for path in into.rglob("*") if path.is_dir())}):
        (package / "__init__.py").write_text(_INIT)


def run_protoc(out: Path) -> None:
    """Runs protoc, with mypy-protobuf for the type stubs of services: grpcio-tools writes stubs of messages only."""
    includes = str(resources.files("grpc_tools") / "_proto")
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python", "mypy_grpc")]
    tool = [sys.executable, "-m", "grpc_tools.protoc", f"--plugin=protoc-gen-mypy_grpc={plugin}"]
    command = [*tool, f"-I{PROTOS}", f"-I{includes}", *outputs, *protos]
    finished = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if finished.returncode:
        sys.exit(finished.stderr)


def serves_nothing(path: Path) -> bool:
    """Returns True for the empty service module that protoc writes for a proto without services."""
    return "_pb2_grpc." in path.name and "Stub" not in path.read_text()


def package_path(path: Path) -> Path:
    """Returns a file's path below `kvmesh.api`. The folder `kvmesh/` is dropped, other top folders are kept."""
    return path.relative_to("kvmesh") if path.parts[0] == "kvmesh" else path


def rewritten(source: str) -> str:
    """Replaces module names in generated code by their names below `kvmesh.api`."""
    source = _IMPORT.sub(lambda match: f"from {below_api(match[1])}{match[2]} import {match[3]}", source)
    return _MODULE_NAME.sub(lambda match: f"{match[1]}{below_api(match[2])}.", source)


def below_api(package: str) -> str:
    """Returns the Python package for the first word of a proto package."""
    return "kvmesh.api" if package == "kvmesh" else f"kvmesh.api.{package}"


def files_below(folder: Path) -> Iterator[Path]:
    """Returns the files of a generated tree, without __pycache__."""
    return (
        path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )


def differences(fresh: Path, committed: Path) -> Iterator[str]:
    """Describes each file that differs between two trees."""
    have, want = set(files_below(committed)), set(files_below(fresh))
    yield from (f"missing: {path}" for path in want - have)
    yield from (f"no proto generates {path}" for path in have - want)
    yield from (f"differs: {path}" for path in have & want if not filecmp.cmp(fresh / path, committed / path, False))


def report(problems: list[str]) -> int:
    """Prints the differences and the command that fixes them."""
    for problem in problems:
        print(f"kvmesh/api: {problem}")
    if problems:
        print("run `make proto` and commit the result")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
