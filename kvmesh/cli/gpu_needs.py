"""Checks what vLLM's CUDA build needs on this machine. Standard library only, since `scripts/set_up.py` imports it."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmesh.cli.nvidia import Driver

CUDA_NEEDED = (13, 0)
"""The CUDA version of torch 2.13 on PyPI, which vLLM 0.32 pins."""
DRIVER_NEEDED = 580
"""The first driver for CUDA 13."""
APT_INSTALL = "apt-get update && apt-get install"
"""A bare container has no lists of packages."""
INSTALLED_BYTES = 9 * 10**9
DOWNLOADED_BYTES = 5 * 10**9
"""Measured with vllm 0.32.0 on Python 3.11: 8.4 GiB in the environment, 4.4 GB of packages in pip's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A missing requirement and the command that installs it; empty if there is no single command."""

    problem: str
    command: str = ""


def driver_needs(driver: Driver) -> Sequence[Need]:
    """Reports a driver that is too old. A missing driver is not reported."""
    if not driver.devices:
        return ()
    major = driver.version.partition(".")[0]
    is_old = driver.cuda < CUDA_NEEDED if driver.cuda[0] else major.isdecimal() and int(major) < DRIVER_NEEDED
    if not is_old:
        return ()
    runs = f"runs CUDA {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda[0] else "is too old"
    needed = f"{CUDA_NEEDED[0]}.{CUDA_NEEDED[1]}"
    return [
        Need(
            problem=f"the NVIDIA driver {driver.version} {runs}; torch is built for CUDA {needed}: driver {DRIVER_NEEDED} or later",
            command=f"{APT_INSTALL} nvidia-driver-{DRIVER_NEEDED}-server   # then reboot",
        )
    ]


def compiler_needs() -> Sequence[Need]:
    """Returns a C compiler and Python's headers: Triton compiles a part of each kernel when the engine starts."""
    found = []
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        found.append(
            Need(
                problem="there is no C compiler (gcc or clang), which Triton needs to compile kernels",
                command=f"{APT_INSTALL} gcc libc6-dev",
            )
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        found.append(
            Need(
                problem=f"{header} is missing, which Triton needs to compile kernels",
                command=f"{APT_INSTALL} python{version}-dev",
            )
        )
    return found


def disk_needs(needed_bytes: Mapping[Path, int]) -> Sequence[Need]:
    """Checks free disk space for each folder. Folders of one file system are added up."""
    totals: dict[int, tuple[Path, int]] = {}
    for folder, size in needed_bytes.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        first, total = totals.get(existing.stat().st_dev, (existing, 0))
        totals[existing.stat().st_dev] = (first, total + size)
    needs = []
    for folder, size in totals.values():
        free = shutil.disk_usage(folder).free
        if free < size:
            needs.append(
                Need(
                    problem=f"{free / 1e9:.1f} GB are free at {folder}, and {size / 1e9:.0f} GB are needed",
                    command="KVMESH_VENV=... KVMESH_CACHE=... make up   # folders on a larger disk",
                )
            )
    return needs


def render_needs(needs: Sequence[Need]) -> str:
    """Returns a list of problems with their commands."""
    lines = []
    for need in needs:
        lines.append(f"  - {need.problem}")
        if need.command:
            lines.append(f"      {need.command}")
    return "\n".join(lines)
