"""Unpacks an earlier commit of this repository, to compare it with the present one."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.services import ROOT

BEFORE = "1bbc2d1"
"""The commit before the work to simplify the code."""


@contextmanager
def earlier_tree(commit: str) -> Iterator[Path]:
    """Unpacks the commit's files into a temporary folder. Needs git's history."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-earlier-") as folder:
        archive = Path(folder) / "tree.tar"
        subprocess.run(["git", "archive", "--output", str(archive), commit], cwd=ROOT, check=True)
        subprocess.run(["tar", "--extract", "--file", str(archive), "--directory", folder], check=True)
        archive.unlink()
        yield Path(folder)
