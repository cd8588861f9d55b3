"""Which Python set-up runs on, and what a machine without one is told."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "python.sh"


def found(folder: Path, **env: str) -> tuple[int, str, str]:
    """Status, output and messages of the script, with only `folder` on PATH."""
    command = ["/bin/sh", str(SCRIPT)]
    done = subprocess.run(command, env={"PATH": str(folder), **env}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_name_without_a_python_behind_it_is_passed_over(tmp_path: Path) -> None:
    """As the launchers of version managers are: the next one serves."""
    program(tmp_path / "python3.11", "exit 127")
    program(tmp_path / "python3", f'exec {sys.executable} "$@"')
    assert found(tmp_path) == (0, f"{tmp_path}/python3\n", "")


def test_without_one_the_message_says_what_to_install(tmp_path: Path) -> None:
    """And what was found."""
    status, _, said = found(tmp_path)
    assert status == 1 and "found: none of python3.11 python3.12 python3.13 python3 on PATH" in said
    assert "apt-get install python3 python3-venv" in said
    program(tmp_path / "python3", '[ "${2#*platform}" != "$2" ] && echo 3.9.2; exit 1')
    assert "found: python3 (3.9.2" in found(tmp_path)[2]


def test_a_chosen_python_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """Others are not taken instead."""
    program(tmp_path / "python3", f'exec {sys.executable} "$@"')
    status, output, said = found(tmp_path, KVMESH_PYTHON="/nowhere/python")
    assert (status, output) == (1, "") and "KVMESH_PYTHON names /nowhere/python, which is not there" in said
