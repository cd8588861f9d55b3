"""Writes the locks of the CUDA builds: `constraints-gpu.txt` (vLLM) and `constraints-sglang-gpu.txt` (SGLang's own environment).

    python scripts/lock_gpu.py          resolves them in seconds, without a GPU and without downloading packages (`make lock` runs it)

uv resolves the extras of pyproject.toml for Linux on x86_64 and aarch64 and for all supported Pythons, with wheels only. Packages that the other
locks pin keep their versions. `lock_hashes.py` then adds the digests.
"""

import json
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from lock_hashes import ROOT, key_of, locked, uv, uv_environment

MACHINES = ("x86_64", "aarch64")
PYTHONS = ">=3.11,<3.14"
SUPPORTED = (
    "(platform_machine == 'aarch64' or platform_machine == 'x86_64') and sys_platform == 'linux'",
    "((platform_machine == 'aarch64' and sys_platform == 'linux') or (platform_machine == 'x86_64' and sys_platform == 'linux'))",
)
"""The markers that uv writes for packages that all supported machines need."""
INSTALLED_BEFORE = ("", "-top")
"""Suffixes of the locks that are always installed too."""
GPU_LOCKS = {
    # This lock is installed beside those of services and tests, so it must agree with them.
    "-gpu": ("vllm", ("", "-top", "-dev"), "What vLLM's CUDA build and NIXL add on a machine with a GPU."),
    "-sglang-gpu": ("sglang", (), "SGLang's own virtual environment on a machine with a GPU."),
}
"""By suffix: the extra of pyproject.toml, the suffixes of the locks that are installed with it, and the first line."""
SGLANG_SIDE = "xxhash>=4.1"
"""A package that kvmesh's code in SGLang's process needs."""


def write_gpu_locks() -> None:
    for suffix, (extra, beside, title) in GPU_LOCKS.items():
        lines = resolved(requirements(extra), beside)
        known = {key_of(pin_of(line)) for each in INSTALLED_BEFORE if each in beside for line in locked(each)}
        kept = [line for line in lines if key_of(pin_of(line)) not in known]
        head = [f"# {title}", "# Written by scripts/lock_gpu.py (`make lock`)."]
        (ROOT / f"constraints{suffix}.txt").write_text("\n".join([*head, *kept]) + "\n")


def requirements(extra: str) -> list[str]:
    """Returns the requirements of an environment with this extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = project["optional-dependencies"][extra]
    return [*own, SGLANG_SIDE] if extra == "sglang" else [*project["dependencies"], *own]


def resolved(wanted: Sequence[str], beside: Iterable[str]) -> list[str]:
    """Returns the pins that uv finds, with markers for packages that not every supported machine needs."""
    environments = [f"sys_platform == 'linux' and platform_machine == '{each}'" for each in MACHINES]
    limits = [word for each in beside for word in ("-c", str(ROOT / f"constraints{each}.txt"))]
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "pyproject.toml"
        project.write_text(
            f'[project]\nname = "lock"\nversion = "0"\nrequires-python = "{PYTHONS}"\n'
            f"dependencies = {json.dumps(list(wanted))}\n[tool.uv]\nenvironments = {json.dumps(environments)}\n"
        )
        command = [str(uv()), "pip", "compile", "--quiet", "--universal", "--only-binary", ":all:"]
        options = ["--no-header", "--no-annotate", *limits]
        found = subprocess.run(
            [*command, *options, str(project)],
            check=True,
            cwd=folder,
            env=uv_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
    return [simplified(line) for line in found.stdout.splitlines() if line and line[0] not in "# "]


def simplified(line: str) -> str:
    """Returns a pin without the part of its marker that is always true on supported machines."""
    marker = line.partition(";")[2].strip()
    for each in (*SUPPORTED, "sys_platform == 'linux'"):
        marker = marker.replace(each, "").strip()
    marker = re.sub(r"^and | and$", "", marker).strip()
    return f"{pin_of(line)}; {marker}" if marker else pin_of(line)


def pin_of(line: str) -> str:
    """Returns `name==version` of a line."""
    return line.partition(";")[0].strip()


if __name__ == "__main__":
    write_gpu_locks()
