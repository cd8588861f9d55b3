"""Which Python the set-up uses, and its message on a machine without one."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "python.sh"


def found(folder: Path, **env: str) -> tuple[int, str, str]:
    """Runs the script with only `folder` on PATH. Returns status, output and messages."""
    command = ["/bin/sh", str(SCRIPT)]
    done = subprocess.run(command, env={"PATH": str(folder), **env}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_name_that_does_not_run_python_is_skipped(tmp_path: Path) -> None:
    """Launchers of version managers can be such names. The script then tries the next name."""
    program(tmp_path / "python3.11", "exit 127")
    program(tmp_path / "python3", f'exec {sys.executable} "$@"')
    assert found(tmp_path) == (0, f"{tmp_path}/python3\n", "")


def test_without_python_the_message_names_the_packages(tmp_path: Path) -> None:
    """The message also lists what was found."""
    status, _, message = found(tmp_path)
    assert status == 1 and "found: none of python3.11 python3.12 python3.13 python3 on PATH" in message
    assert "apt-get install python3 python3-venv" in message
    program(tmp_path / "python3", '[ "${2#*platform}" != "$2" ] && echo 3.9.2; exit 1')
    assert "found: python3 (3.9.2" in found(tmp_path)[2]


def test_an_unusable_kvmesh_python_is_reported(tmp_path: Path) -> None:
    """The script does not use another Python instead."""
    program(tmp_path / "python3", f'exec {sys.executable} "$@"')
    status, output, message = found(tmp_path, KVMESH_PYTHON="/nowhere/python")
    assert (status, output) == (1, "") and "KVMESH_PYTHON names /nowhere/python, which is not there" in message
