"""Prepares SGLang's virtual environment beside kvmesh's own: `$KVMESH_VENV-sglang`.

SGLang pins other versions of packages than vLLM. A worker of kvmesh's own environment starts SGLang with this one's Python, which
imports kvmesh from the source tree. On a
machine without a GPU it is installed from `constraints-sglang.txt` with the CPU build of torch; with a GPU pip resolves SGLang's own
requirements. A stamp tells a second run that nothing changed. Mooncake, which is not the default transfer backend, also needs the
system package libibverbs1.
"""

import hashlib
import platform
import sys
import time
from pathlib import Path

import set_up
from pip_progress import installed_packages, missing_lines

from kvmesh.cli.nvidia import read_driver

LOCK = set_up.ROOT / "constraints-sglang.txt"
STAMP = ".kvmesh-sglang"
SUFFIX = "-sglang"
GPU_PACKAGES = ("sglang==0.5.23", "nixl==1.5.1", "xxhash>=4.1")
"""Requirements that pip resolves on a GPU machine: SGLang, the transfer backend, and kvmesh's own in the engine process."""


def main() -> int:
    """Sets up the environment unless its stamp is current."""
    # All functions of set_up install into this environment.
    set_up.VENV = Path(f"{set_up.VENV}{SUFFIX}")
    set_up.LOG = set_up.CACHE / "set-up-sglang.log"
    with set_up.only_one():
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
    digest = hashlib.sha256(repr((engine, sys.version_info[:2], str(set_up.ROOT), GPU_PACKAGES)).encode())
    digest.update(LOCK.read_bytes())
    return digest.hexdigest()


def install(engine: str) -> None:
    started = time.monotonic()
    set_up.LOG.write_text("")
    set_up.make_venv()
    before = set(set_up.site_entries())
    set_up.say(f"installing SGLang (log: {set_up.LOG})")
    if engine == "gpu":
        set_up.pip(*GPU_PACKAGES)
    else:
        install_lock()
    set_up.compile_packages([path for path in set_up.site_entries() if path not in before])
    set_up.say(f"SGLang ready after {time.monotonic() - started:.0f} s")


def install_lock() -> None:
    """torch first, so that no package pulls its CUDA build. The lock is complete: pip resolves nothing."""
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    torch = next(line for line in lines if line.startswith("torch=="))
    if set_up.installed_torch() != torch.removeprefix("torch==") and not set_up.install_torch(torch):
        set_up.fail(f"pip install {torch}")
    missing = missing_lines([line for line in lines if line != torch], installed_packages(set_up.VENV / "lib"))
    if missing and set_up.pip_lines_status(missing) != 0:
        set_up.fail("pip install of constraints-sglang.txt")


if __name__ == "__main__":
    sys.exit(main())
