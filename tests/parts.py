"""External parts that tests need and that a machine may lack: `require_part("consul")` returns the path or skips the test.

If parts are required (CI, or KVMESH_REQUIRE_PARTS=1), a missing part fails the test instead, provided that this kind of machine can have it.
Otherwise a suite in which every test is skipped would look like a pass.
"""

import importlib.util
import json
import os
import platform
import shutil
import sys
from ctypes.util import find_library
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("KVMESH_CACHE") or ROOT / ".cache")

Part = Literal[
    "consul",
    "prometheus",
    "promtool",
    "docker",
    "docker-compose",
    "debootstrap",
    "postgres",
    "systemd-analyze",
    "nixl",
    "vllm",
    "sglang",
    "mooncake",
    "chromium",
    "curl",
]
# The package of each Python part, and its backends, of which at least one must be installed.
PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "nixl": ("nixl", ("nixl_cu13", "nixl_cu12", "nixl_rocm")),
    "vllm": ("vllm", ("vllm",)),
}

READY = ".kvmesh-sglang"
"""`make setup` writes this file when SGLang's environment is complete."""


def require_part(name: Part) -> Path:
    """Returns the part's binary, package folder or (SGLang) Python. Skips or fails the test with a reason if the part is missing."""
    found = FINDERS[name]() if name in FINDERS else _package(name) if name in PACKAGES else _binary(name)
    if isinstance(found, Path):
        return found
    if is_required() and _is_installable(name):
        pytest.fail(f"{name} is required here: {found}", pytrace=False)
    pytest.skip(f"no {name}: {found}")


def _binary(name: str) -> Path | str:
    """Returns a server's path, or the reason that scripts/install_parts.py recorded for its absence."""
    # The choice of the set-up comes first, because it checks whether a binary on PATH has the needed features.
    outcomes = CACHE / "parts.json"
    outcome = json.loads(outcomes.read_text()).get(name, {}) if outcomes.exists() else {}
    if "path" in outcome and Path(outcome["path"]).exists():
        return Path(outcome["path"])
    if on_path := shutil.which(name):
        return Path(on_path)
    return str(outcome.get("reason", "not set up; run `make setup`"))


def _package(name: str) -> Path | str:
    """Returns a package's folder, or a message that names what is not installed."""
    package, backends = PACKAGES[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return f"the package {package} is not installed"
    if not any(importlib.util.find_spec(backend) for backend in backends):
        return f"none of {', '.join(backends)} is installed"
    return Path(spec.origin).parent


def sglang_python() -> Path | str:
    """Returns the Python of SGLang's virtual environment, or the reason for its absence."""
    python = Path(f"{sys.prefix}-sglang") / "bin" / "python"
    return (
        python if (python.parent.parent / READY).exists() else f"{python.parent.parent} is not set up; run `make setup`"
    )


def _postgres() -> Path | str:
    """Returns the server program of the newest PostgreSQL, which Debian does not put on PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[4]))
    return found[-1] if found else _binary("postgres")


def _mooncake() -> Path | str:
    """Returns a system library that Mooncake loads, or a message that one is missing."""
    found = [find_library(name) for name in ("ibverbs", "curl")]
    return Path(found[0]) if found[0] and found[1] else "Mooncake needs the system packages libibverbs1 and libcurl4"


def _chromium() -> Path | str:
    """Returns the browser, or a message that the system library of its driver is missing."""
    return _binary("chromium") if find_library("atomic") else "its driver needs the system package libatomic1"


FINDERS = {"sglang": sglang_python, "mooncake": _mooncake, "chromium": _chromium, "postgres": _postgres}


def is_required() -> bool:
    """Returns whether a missing part fails the test."""
    return bool(os.environ.get("CI")) or os.environ.get("KVMESH_REQUIRE_PARTS") == "1"


def _is_installable(name: str) -> bool:
    """Returns whether `make setup` can install the part on this kind of machine."""
    if name in PACKAGES or name == "sglang":
        return sys.platform == "linux" and platform.machine() == "x86_64"
    if (
        name in ("mooncake", "chromium", "curl", "postgres", "systemd-analyze", "docker", "debootstrap")
        and os.geteuid() != 0
    ):
        return False
    return Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None
