"""Tests the start of `kvmesh up` for GPU machines without a GPU: vLLM's CUDA build on a stub driver. Run it by hand.

    python scripts/gpu_dry_run.py --venv /tmp/kvmesh-gpu

1. Installs vLLM's CUDA build as set-up does, if the virtual environment lacks it: 5 GB of packages, 9 GB on disk.
2. Compiles stub_driver.c, which reports the number of devices of each case and supports nothing else.
3. Imports the modules that the fork server imports, and counts threads: forking is safe with one.
4. Runs `kvmesh up` for each case until every worker has requested a context on its device, and prints the table.

Exits with status 0 if there was one thread and every worker of the first group reached its device.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lock_hashes import hashed, locked

ROOT = Path(__file__).resolve().parent.parent
CASE_TIMEOUT_S = 420.0
"""Time limit of a case. Importing vLLM and building its configuration takes one to two minutes on two busy cores."""
STOP_TIMEOUT_S = 60.0
POLL_S = 0.5
SHAPES = {
    "1P+1D": "",
    "2P+2D": "--prefill 2 --decode 2",
    "TP 2": "--tensor-parallel 2",
    "0P+1D": "--prefill 0",
}
DEVICES = (1, 2, 4, 8)
CONTEXT = re.compile(r"stub driver: context on device (\d+)")
ROW = re.compile(r"kvmesh: ((?:prefill|decode)-\d+) +([\d ]*\d) +0\.\d")
SHARED = re.compile(r"number (\d+) to start")
PRELOAD = """
import sys
from kvmesh.engines.vllm.preload import preload
from kvmesh.worker.fork_loop import other_threads
preload()
from vllm.platforms import current_platform
print("PLATFORM", type(current_platform).__name__, "THREADS", 1 + len(other_threads()), *other_threads())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mesh on one machine."""

    shape: str
    devices: int


def main() -> int:
    """Runs all cases. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--venv", type=Path, required=True, help="virtual environment of the CUDA build; created if missing"
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo", help="model directory")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this shape; may be repeated")
    parser.add_argument("--devices", action="append", type=int, help="only this number of devices; may be repeated")
    options = parser.parse_args()
    venv = options.venv.absolute()
    install(venv)
    with tempfile.TemporaryDirectory(prefix="kvmesh-stub-") as folder:
        environment = stub_environment(Path(folder))
        is_well = check_threads(venv, environment)
        for shape in options.shape or SHAPES:
            for devices in options.devices or DEVICES:
                is_well &= run_case(Case(shape=shape, devices=devices), venv, options.model.absolute(), environment)
    return 0 if is_well else 1


def install(venv: Path) -> None:
    """Installs the build `gpu` in the same way as scripts/set_up.py."""
    python = venv / "bin" / "python"
    if list(venv.glob("lib/python*/site-packages/vllm/__init__.py")):
        return
    print(f"installing vLLM's CUDA build into {venv}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    lines = [line for suffix in ("", "-top", "-gpu") for line in locked(suffix)]
    (venv / "packages.txt").write_text("".join(f"{line}\n" for line in hashed(lines)))
    pip = (str(python), "-m", "pip", "install", "--no-compile", "-q", "--no-deps")
    checked = ("--require-hashes", "--only-binary", ":all:", "-r", str(venv / "packages.txt"))
    subprocess.run([*pip, *checked], check=True)
    subprocess.run([*pip, "--no-build-isolation", "-e", str(ROOT)], check=True)


def stub_environment(folder: Path) -> Mapping[str, str]:
    """Compiles both stub libraries. Returns the environment variables that load them first."""
    source = ROOT / "scripts" / "stub_driver.c"
    compiler = os.environ.get("CC", "cc")
    for name, flags in (("libnvidia-ml.so.1", ["-DSTUB_NVML"]), ("libcuda.so.1", [])):
        subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", folder / name, source], check=True)
    # Without cached bytecode, each process would compile the modules of vLLM and torch for a minute.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH")))),
        "LD_PRELOAD": str(folder / "libcuda.so.1"),
        "PYTHONWARNINGS": "ignore",
        "STUB_HOLD": "1",
    }


def check_threads(venv: Path, environment: Mapping[str, str]) -> bool:
    """Returns whether only one thread runs after the fork server's imports on the CUDA platform."""
    command = [str(venv / "bin" / "python"), "-c", PRELOAD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("PLATFORM")]
    print(lines[0] if lines else done.stderr[-2000:], flush=True)
    return bool(lines) and "CudaPlatform" in lines[0] and " THREADS 1" in lines[0]


def run_case(case: Case, venv: Path, model: Path, environment: Mapping[str, str]) -> bool:
    """Runs one mesh. Prints its output and the devices of its workers. Returns whether these are the devices in its table."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-dry-run-") as folder:
        run_dir = Path(folder)
        output = run_dir / "up.txt"
        up = [str(venv / "bin" / "python"), "-m", "kvmesh.cli", "up", "--model", str(model), "--port", "0"]
        flags = [
            "--run-dir",
            str(run_dir),
            "--no-planner",
            "--stop-timeout-s",
            "3",
            "--ready-timeout-s",
            str(CASE_TIMEOUT_S),
        ]
        own = {"STUB_GPUS": str(case.devices), "KVMESH_STATE": str(run_dir / "mesh.json")}
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*up, *flags, *shlex.split(SHAPES[case.shape])],
                env={**environment, **own},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                wait_contexts(process, output, run_dir)
            finally:
                stop(process)
        return report(case, output.read_text(errors="replace"), run_dir)


def wait_contexts(process: "subprocess.Popen[bytes]", output: Path, run_dir: Path) -> None:
    """Waits until every worker of the first group has requested its devices, or `kvmesh up` has ended."""
    ends_s = time.monotonic() + CASE_TIMEOUT_S
    while process.poll() is None and time.monotonic() < ends_s:
        expected = first_turn(output.read_text(errors="replace"))
        if expected and all(contexts(run_dir, name) == wanted for name, wanted in expected.items()):
            return
        time.sleep(POLL_S)


def first_turn(text: str) -> Mapping[str, Sequence[int]]:
    """Returns the devices of the workers that start first, from the table that `kvmesh up` prints."""
    rows = {}
    for line in text.splitlines():
        if (row := ROW.match(line)) and ((shared := SHARED.search(line)) is None or shared[1] == "1"):
            rows[row[1]] = sorted(int(word) for word in row[2].split())
    return rows


def contexts(run_dir: Path, name: str) -> Sequence[int]:
    """Returns the devices that a worker and its ranks have requested."""
    try:
        text = (run_dir / f"{name}.log").read_text(errors="replace")
    except FileNotFoundError:
        return []
    return sorted({int(word) for word in CONTEXT.findall(text)})


def report(case: Case, text: str, run_dir: Path) -> bool:
    """Prints the result of a case. Returns whether it passed."""
    print(f"\n== {case.shape} on {case.devices} devices", flush=True)
    expected = first_turn(text)
    if not expected:
        print("\n".join(text.splitlines()[-3:]), flush=True)
        return "are needed, and" in text or "needs 2 devices" in text
    is_well = True
    for line in text.splitlines():
        if row := ROW.match(line):
            reached = contexts(run_dir, row[1])
            ends = "starts when the others are ready"
            if row[1] in expected:
                ends = f"asked for a context on {' '.join(map(str, reached)) or 'none'}"
                is_well &= reached == expected[row[1]]
            print(f"{line.removeprefix('kvmesh: ')}  | {ends}", flush=True)
    if not is_well:
        for log in sorted(run_dir.glob("*.log")):
            print(f"-- {log.name}\n{log.read_text(errors='replace')[-3000:]}", flush=True)
        print(text[-3000:], flush=True)
    return is_well


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Stops `kvmesh up` as Ctrl-C does. Kills it after a time limit."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
