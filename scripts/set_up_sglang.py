"""Prepares SGLang's virtual environment, `$KVMESH_VENV-sglang`, separate from kvmesh's own.

SGLang pins other versions of packages than vLLM. A worker in kvmesh's environment starts SGLang with the Python of this environment, which
imports kvmesh from the source tree. On a machine without a GPU, the packages come from `constraints-sglang.txt` with the CPU build of torch,
with a GPU from `constraints-sglang-gpu.txt`. A stamp file lets a second run skip the installation if nothing has changed. Mooncake, which is not
the default transfer backend, also needs the system packages libibverbs1 and libcurl4.
"""

import hashlib
import platform
import sys
import time
from pathlib import Path

import set_up
from lock_hashes import HASHES
from pip_progress import installed_packages, missing_lines

from kvmesh.cli.nvidia import read_driver

LOCK = set_up.ROOT / "constraints-sglang.txt"
GPU_LOCK = set_up.ROOT / "constraints-sglang-gpu.txt"
STAMP = ".kvmesh-sglang"
SUFFIX = "-sglang"


def main() -> int:
    """Sets up the environment unless its stamp is current."""
    # All functions of set_up install into this environment.
    set_up.VENV = Path(f"{set_up.VENV}{SUFFIX}")
    set_up.LOG = set_up.CACHE / "set-up-sglang.log"
    with set_up.exclusive_lock():
        engine = set_up.chosen_engine(read_driver()).engine
        if engine == "none" or not is_supported():
            set_up.say("SGLang has no build for this machine")
            return 0
        want = fingerprint(engine)
        stamp = set_up.VENV / STAMP
        if stamp.exists() and stamp.read_text() == want:
            return 0
        install(engine)
        stamp.write_text(want)
    return 0


def is_supported() -> bool:
    """Returns whether PyPI has a wheel of SGLang: for Linux on x86-64."""
    return set_up.no_vllm_reason() == "" and platform.machine() == "x86_64"


def fingerprint(engine: str) -> str:
    """Returns a hash of everything that determines which packages are installed."""
    digest = hashlib.sha256(repr((engine, sys.version_info[:2], str(set_up.ROOT))).encode())
    for path in (LOCK, GPU_LOCK, HASHES):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def install(engine: str) -> None:
    started = time.monotonic()
    set_up.LOG.write_text("")
    set_up.make_venv()
    before = set(set_up.site_entries())
    set_up.say(f"installing SGLang (log: {set_up.LOG})")
    if engine == "gpu":
        set_up.install_lines(lines_of(GPU_LOCK))
    else:
        install_lock()
    set_up.compile_packages([path for path in set_up.site_entries() if path not in before])
    set_up.say(f"SGLang ready after {time.monotonic() - started:.0f} s")


def install_lock() -> None:
    """Installs the lock. torch comes first, so that no package installs its CUDA build. The lock is complete, so pip resolves nothing."""
    lines = lines_of(LOCK)
    torch = next(line for line in lines if line.startswith("torch=="))
    builds = (torch.removeprefix("torch=="), set_up.cuda_torch_version())
    if set_up.installed_torch() not in builds and not set_up.install_torch(torch):
        set_up.fail(f"pip install {torch}")
    missing = missing_lines(set_up.lines_beside_torch(lines), installed_packages(set_up.VENV / "lib"))
    if missing and set_up.pip_lines_status(missing) != 0:
        set_up.fail("pip install of constraints-sglang.txt")


def lines_of(lock: Path) -> list[str]:
    """Returns the requirements in a lock file."""
    return [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]


if __name__ == "__main__":
    sys.exit(main())
