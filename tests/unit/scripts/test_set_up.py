"""The engine build that the set-up chooses for drivers that work, fail, or are missing. The driver libraries are compiled for the test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import sys
sys.path[:0] = ["scripts", "."]
import set_up
driver = set_up.read_driver()
choice = set_up.chosen_engine(driver)
print(choice.engine, choice.reason, sep="|")
if len(sys.argv) > 1:
    set_up.check_gpu_machine(driver)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a library that answers like the driver's."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = ROOT / "scripts" / "stub_driver.c"
    command = [compiler, "-shared", "-fPIC", "-DSTUB_NVML", "-o", folder / "libnvidia-ml.so.1", source]
    subprocess.run(command, check=True)
    return folder


def set_up(*argv: str, **env: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if name != "KVMESH_ENGINE_BUILD"}
    # Without installed packages, because the set-up runs before they are installed.
    command = [sys.executable, "-S", "-c", CODE, *argv]
    return subprocess.run(command, cwd=ROOT, env={**clean, **env}, capture_output=True, text=True, check=False)


def test_the_driver_determines_the_build(driver: Path) -> None:
    """Device files are no criterion: a container may have only /dev/nvidia3, and WSL has none."""
    got = set_up(LD_LIBRARY_PATH=str(driver), STUB_GPUS="2")
    assert got.stdout == "gpu|NVML lists 2 x NVIDIA H100 80GB HBM3, driver 580.65.06\n", got.stderr
    got = set_up(LD_LIBRARY_PATH=str(driver), STUB_NVML_ERROR="18", PATH="/nonexistent")
    assert got.stdout.startswith("cpu|the NVIDIA driver does not answer (nvmlInit_v2: Driver/library version mismatch)")
    got = set_up(LD_LIBRARY_PATH=str(driver), STUB_GPUS="0", PATH="/nonexistent")
    assert got.stdout.startswith("cpu|the NVIDIA driver lists no device")
    assert set_up(LD_LIBRARY_PATH=str(driver), KVMESH_ENGINE_BUILD="cpu").stdout == "cpu|KVMESH_ENGINE_BUILD is cpu\n"


def test_missing_requirements_are_reported_before_the_download(driver: Path, tmp_path: Path) -> None:
    """One message has all of them with the commands. A chosen build may be for another machine, so its driver is not checked."""
    env = {"LD_LIBRARY_PATH": str(driver), "STUB_DRIVER": "550.54.15", "STUB_CUDA": "12040", "PATH": "/nonexistent"}
    env |= {"KVMESH_VENV": str(tmp_path), "KVMESH_CACHE": str(tmp_path), "CC": ""}
    got = set_up("check", **env)
    assert got.returncode == 1
    assert "the NVIDIA driver 550.54.15 runs CUDA 12.4; torch is built for CUDA 13.0" in got.stderr
    assert "there is no C compiler" in got.stderr and "apt-get update && apt-get install gcc" in got.stderr
    assert "nothing was downloaded" in got.stderr
    chosen = set_up("check", KVMESH_ENGINE_BUILD="gpu", **env)
    assert "driver 550" not in chosen.stderr and "there is no C compiler" in chosen.stderr
