"""Reads pip's progress from its output: packages downloaded and installed, and megabytes."""

import re
from collections.abc import Iterable
from pathlib import Path

_ARCHIVE = re.compile(
    r"^ *(?:Downloading|Using cached|Processing) (\S+\.(?:whl|tar\.gz|zip))(?: \(([\d.]+) ([kMG]?B)\))?", re.M
)
_INSTALLING = re.compile(r"^Installing collected packages: (.+)$", re.M)
_MEGABYTES = {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}


def progress_text(output: str, *, wanted: int, installed: int) -> str:
    """Describes a running `pip install` in one line; empty before the first package.

    `wanted` is the number of packages to install, 0 when pip decides. `installed` is the number that it has installed already.
    """
    archives = {Path(name).name: _megabytes(size, unit) for name, size, unit in _ARCHIVE.findall(output)}
    if found := _INSTALLING.search(output):
        return f"installing: {installed} of {len(found[1].split(', '))} packages"
    if not archives:
        return ""
    count = f"{len(archives)} of {wanted}" if wanted else str(len(archives))
    last = list(archives)[-1].partition("-")[0]
    return f"downloading: {count} packages, {sum(archives.values()):.0f} MB (now {last})"


def _megabytes(size: str, unit: str) -> float:
    return float(size) * _MEGABYTES[unit] if size else 0.0


def installed_packages(folder: Path) -> dict[str, str]:
    """Returns the version of each package in an environment's `lib` folder, by normalised name."""
    found = (
        path.name.removesuffix(".dist-info").rpartition("-")
        for path in folder.glob("python*/site-packages/*.dist-info")
    )
    return {normal(name): version for name, _, version in found}


def missing_lines(lines: Iterable[str], installed: dict[str, str]) -> list[str]:
    """Returns the lines of a lock, `name==version; marker`, whose package is not installed at that version."""
    pins = {
        line.strip(): line.partition(";")[0].strip().partition("==")
        for line in lines
        if "==" in line and line[0] != "#"
    }
    return [line for line, (name, _, version) in pins.items() if installed.get(normal(name)) != version]


def normal(name: str) -> str:
    """Normalises a package name as PEP 503 does."""
    return re.sub(r"[-_.]+", "-", name).lower()
