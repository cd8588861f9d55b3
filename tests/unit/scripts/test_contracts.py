"""The committed image of the contracts guards them against breaking changes."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUF = Path(sys.executable).parent / "buf"


def breaking(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [BUF, "breaking", "--against", "protos/contracts.binpb"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_contracts_keep_what_the_image_has() -> None:
    """Who breaks a contract on purpose runs `make contracts` and says so in the changelog."""
    finished = breaking(ROOT)
    assert not finished.returncode, finished.stdout


def test_a_removed_field_is_noticed(tmp_path: Path) -> None:
    """The image holds messages and fields, not file names alone."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    legs = tmp_path / "protos" / "kvmesh" / "worker" / "v1" / "legs.proto"
    legs.write_text(legs.read_text().replace("  string leg_id = 1;\n", ""))
    finished = breaking(tmp_path)
    assert finished.returncode
    assert '"leg_id"' in finished.stdout
