"""An earlier state of this repository, to measure beside the present one."""

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
        _decode_single_tokens(Path(folder))
        yield Path(folder)


def _decode_single_tokens(tree: Path) -> None:
    """Turns off what an old simulated engine did where steps take no time: it decoded eight tokens as one output, which no engine
    does."""
    engine = tree / "kvmesh" / "engines" / "simulated" / "engine.py"
    engine.write_text(engine.read_text().replace("\nSTEPS_PER_TURN = 8\n", "\nSTEPS_PER_TURN = 1\n"))
