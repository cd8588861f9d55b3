"""Prepare this clone: a virtual environment from the lock, an engine build for this machine, and what the tests need.

Run by `make up` and `make test` with whatever Python 3.11+ the machine has; standard library only. Everything goes to
`.venv/` and `.cache/` in the repository (elsewhere with KVMESH_VENV and KVMESH_CACHE). A second run sees by a stamp
that nothing changed and ends at once; two runs at the same time take turns.

KVMESH_ENGINE_BUILD chooses the engine build: `cpu`, `gpu` (vLLM from PyPI, CUDA) or `none`; by default `gpu` where the NVIDIA
driver lists a device. What the CUDA build needs of the machine is checked before the download.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Nothing is installed yet: these modules need the standard library only.
sys.path.insert(0, str(ROOT))
from kvmesh.cli.gpu_needs import (  # noqa: E402
    DOWNLOADED_BYTES,
    INSTALLED_BYTES,
    compiler_needs,
    disk_needs,
    driver_needs,
    render_needs,
)
from kvmesh.cli.nvidia import Driver, read_driver  # noqa: E402

VENV = Path(os.environ.get("KVMESH_VENV") or ROOT / ".venv").absolute()
CACHE = Path(os.environ.get("KVMESH_CACHE") or ROOT / ".cache").absolute()
LOG = CACHE / "set-up.log"
LOCKS = {
    "base": ROOT / "constraints.txt",  # every service
    "cpu": ROOT / "constraints-cpu.txt",  # what vLLM's CPU build and NIXL add
    "dev": ROOT / "constraints-dev.txt",  # what the tests and checks add
}
# PyTorch's own index of CPU builds. PyPI's build of the same version is the CUDA one, 3 GB of libraries that a machine
# without a GPU cannot use.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> int:
    """Set up for serving, or with `--tests` for the tests as well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="also the tests' packages and system parts")
    tests = parser.parse_args().tests
    with only_one():
        driver = read_driver()
        set_up_packages(chosen_engine(driver), tests, driver)
        if tests:
            parts = [sys.executable, str(ROOT / "scripts" / "install_parts.py")]
            subprocess.run(parts, check=True, env={**os.environ, "KVMESH_CACHE": str(CACHE)})
    return 0


@contextmanager
def only_one() -> Iterator[None]:
    """Hold the set-up lock of this clone; the kernel gives it back when the process ends, however it ends."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "set-up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this clone is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Choice(NamedTuple):
    """An engine build, and why it was chosen."""

    engine: str
    reason: str


def chosen_engine(driver: Driver) -> Choice:
    """Which engine build fits this machine, by what the user or the NVIDIA driver says."""
    wanted = os.environ.get("KVMESH_ENGINE_BUILD", "")
    if wanted in ("cpu", "gpu", "none"):
        return Choice(wanted, f"KVMESH_ENGINE_BUILD is {wanted}")
    if wanted:
        sys.exit(f"kvmesh set-up: KVMESH_ENGINE_BUILD is {wanted!r}; it may be cpu, gpu or none")
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        return Choice("none", f"vLLM has no build for {sys.platform} on {machine}")
    if driver.devices:
        first, count = driver.devices[0], len(driver.devices)
        return Choice("gpu", f"{driver.source} lists {count} x {first.name}, driver {driver.version}")
    return Choice("cpu", f"{driver.problem}; with a GPU here, KVMESH_ENGINE_BUILD=gpu")


def check_gpu_machine(driver: Driver) -> None:
    """End the set-up with all that is missing, before gigabytes are downloaded.

    A build that the user chose may be for another machine, so its driver is not judged.
    """
    is_chosen = os.environ.get("KVMESH_ENGINE_BUILD") == "gpu"
    needs = [
        *([] if is_chosen else driver_needs(driver)),
        *compiler_needs(),
        *disk_needs({VENV: INSTALLED_BYTES, CACHE: DOWNLOADED_BYTES}),
    ]
    if needs:
        sys.exit(
            "kvmesh set-up: this machine cannot run vLLM's CUDA build yet; nothing was downloaded. Missing (commands for"
            f" Debian and Ubuntu):\n{render_needs(needs)}\nKVMESH_ENGINE_BUILD=cpu make up installs the CPU build instead."
        )


def set_up_packages(choice: Choice, tests: bool, driver: Driver) -> None:
    """Install what the lock lists unless the stamp says that it is there."""
    engine = choice.engine
    stamps = [VENV / ".kvmesh-run", *([VENV / ".kvmesh-tests"] if tests else [])]
    want = fingerprint(engine)
    if all(stamp.exists() and stamp.read_text() == want for stamp in stamps):
        return
    say(f"engine build {engine}: {choice.reason}")
    if engine == "gpu":
        check_gpu_machine(driver)
    started = time.monotonic()
    LOG.write_text("")
    make_venv()
    say(f"installing the pinned packages (log: {LOG})")
    install(engine, tests)
    for stamp in stamps:
        stamp.write_text(want)
    say(f"packages ready after {time.monotonic() - started:.0f} s")


def fingerprint(engine: str) -> str:
    """A hash of all that decides what is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    digest = hashlib.sha256(repr((engine, sys.version_info[:2], str(ROOT), project["project"])).encode())
    for path in (*LOCKS.values(), Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make_venv() -> None:
    """Create the virtual environment, or anew when the Python below it is gone or another."""
    python = VENV / "bin" / "python"
    version = f"import sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    if python.exists() and subprocess.run([python, "-c", version], check=False).returncode == 0:
        return
    say(f"creating {VENV} with Python {platform.python_version()}")
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if run(command) == 0:
        return
    # Debian and Ubuntu ship venv's ensurepip in a package of its own.
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    install_system_package(package, "Python's venv module")
    if run(command) != 0:
        fail(f"{sys.executable} -m venv")


def install(engine: str, tests: bool) -> None:
    """Everything at the lock's versions, then the project itself in place."""
    locks = [LOCKS["base"], *([LOCKS["dev"]] if tests else [])]
    if engine == "gpu":
        # The CUDA build chooses its own torch and CUDA packages, so pip resolves; the lock limits the rest.
        limits = [word for lock in locks for word in ("-c", str(lock))]
        # Where pip's sources also have a CPU build of torch (+cpu), pip prefers it, unless the version is compared as text.
        pip(*limits, f"torch==={torch_version().partition('+')[0]}")
        pip(*limits, "-e", f"{ROOT}[{'vllm,dev' if tests else 'vllm'}]")
        compile_all()
        return
    if engine == "cpu":
        locks.append(LOCKS["cpu"])
        if not has_library("numa"):
            install_system_package("libnuma1", "libnuma, which vLLM's CPU build loads")
        install_torch()
    # The lock is complete, so nothing is resolved: quicker, and no package can pull a CUDA build of torch.
    pip("--no-deps", *(word for lock in locks for word in ("-r", str(lock))))
    pip("--no-deps", "--no-build-isolation", "-e", str(ROOT))
    compile_all()


def install_torch() -> None:
    """The CPU build, from where this machine's pip looks, otherwise from PyTorch's own index."""
    torch = f"torch=={torch_version()}"
    if pip_status("--no-deps", torch) != 0:
        say(f"pip's own sources have no CPU build of torch; asking {TORCH_CPU_INDEX}")
        if pip_status("--no-deps", "--extra-index-url", TORCH_CPU_INDEX, torch) != 0:
            fail(f"pip install {torch} (without vLLM, for simulated engines only: KVMESH_ENGINE_BUILD=none)")


def torch_version() -> str:
    """The version in the lock of the CPU build, with its local part: 2.13.0+cpu."""
    line = next(line for line in LOCKS["cpu"].read_text().splitlines() if line.startswith("torch=="))
    return line.removeprefix("torch==")


def compile_all() -> None:
    """Compile on all cores what pip, told `--no-compile`, would have compiled on one."""
    # An exit status other than 0 is a file that is not for this Python: test data and templates of some packages.
    run([str(VENV / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", str(VENV / "lib")])


def has_library(name: str) -> bool:
    """Whether the dynamic linker knows a shared library."""
    from ctypes.util import find_library

    return find_library(name) is not None


def install_system_package(package: str, what: str) -> None:
    """With apt as root; otherwise say what is missing."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        sys.exit(f"kvmesh set-up: {what} is missing; install it first (Debian, Ubuntu: apt-get install {package})")
    say(f"installing the system package {package}")
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update"], environment)
    if run(["apt-get", "install", "-y", "--no-install-recommends", package], environment) != 0:
        fail(f"apt-get install {package}")


def pip(*arguments: str) -> None:
    """`pip install`, or end with the log's last lines."""
    if pip_status(*arguments) != 0:
        fail(f"pip install {' '.join(arguments)}")


def pip_status(*arguments: str) -> int:
    """`pip install` with this machine's own pip settings."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--no-compile", "--no-input"]
    return run([*command, *arguments], {"PIP_CACHE_DIR": str(CACHE / "pip"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"})


def run(command: list[str], defaults: dict[str, str] | None = None) -> int:
    """Run with the output in the log; `defaults` are environment variables that the caller's own go before."""
    with LOG.open("a") as log:
        log.write(f"{time.strftime('%H:%M:%S')} $ {' '.join(command)}\n")
        log.flush()
        environment = {**(defaults or {}), **os.environ}
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, check=False
        ).returncode


def fail(what: str) -> None:
    """End the set-up with what the failing command said."""
    tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-20:])
    sys.exit(f"{tail}\nkvmesh set-up: {what} failed; the whole log is {LOG}")


def say(text: str) -> None:
    """One line to the person who waits, beside the output of the command proper."""
    print(f"kvmesh set-up: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
