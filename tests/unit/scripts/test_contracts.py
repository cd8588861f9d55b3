"""`buf breaking` compares the contracts with the committed image."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUF = Path(sys.executable).parent / "buf"


def breaking(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [BUF, "breaking", "--against", "protos/contracts.binpb"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_contracts_are_compatible_with_the_image() -> None:
    """For an intended breaking change run `make contracts` and add it to the change log."""
    finished = breaking(ROOT)
    assert not finished.returncode, finished.stdout


def test_a_removed_field_is_detected(tmp_path: Path) -> None:
    """The image contains messages and fields, not only file names."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    legs = tmp_path / "protos" / "kvmesh" / "worker" / "v1" / "legs.proto"
    legs.write_text(legs.read_text().replace("  string leg_id = 1;\n", ""))
    finished = breaking(tmp_path)
    assert finished.returncode
    assert '"leg_id"' in finished.stdout
