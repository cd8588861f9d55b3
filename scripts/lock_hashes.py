"""Writes `constraints-hashes.txt`, the digests of the wheels in the lock.

    python scripts/lock_hashes.py       writes it for the pins of constraints*.txt in a minute (`make lock` runs it last)

Set-up passes the digests to pip, which then installs nothing else (`--require-hashes`). `hashed` needs the standard library only. Writing needs
uv, which is installed into its own environment in the cache, and a connection to PyPI. PyTorch's index has the CPU builds of torch. If it is not
reachable, the file keeps its digests of the same version.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path

from pip_progress import normal

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("KVMESH_CACHE") or ROOT / ".cache").absolute()
HASHES = ROOT / "constraints-hashes.txt"
UV = "uv==0.13.9"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds."""
ENVIRONMENTS = (("", "-top", "-cpu", "-dev"), ("-sglang",), ("-gpu",), ("-sglang-gpu",))
"""Locks that are installed together. Different environments may pin different versions of a package."""
OTHER_CUDA = "nixl-cu13"
"""Installed beside PyPI's CUDA build of torch, at the version of nixl-cu12."""
# Wheels for Linux and the Pythons that set-up accepts.
_PYTHON = re.compile(r"-(?:cp311-cp311|cp312-cp312|cp313-cp313|cp314-cp314|cp3\d+-abi3|(?:py2\.)?py3\d*-none)-")
_PLATFORM = re.compile(r"-any\.whl$|linux\S*_(?:x86_64|aarch64)\.whl$")
Hashes = dict[tuple[str, str], set[str]]
"""Digests by normalised name and version."""


class MissingHashError(Exception):
    """A line of the lock has no digest."""


def hashed(lines: Iterable[str], known: Mapping[tuple[str, str], set[str]] | None = None) -> list[str]:
    """Returns the lines of a lock with the digests of their wheels. Raises MissingHashError."""
    known = read_hashes() if known is None else known
    found = []
    for line in lines:
        pin = line.partition(";")[0]
        digests = known.get(key_of(pin))
        if not digests:
            raise MissingHashError(f"{HASHES.name} has no digest of {pin.strip()}: run `make lock`")
        words = [line, *(f"--hash=sha256:{digest}" for digest in sorted(digests))]
        found.append(" ".join(words))
    return found


def key_of(pin: str) -> tuple[str, str]:
    """Returns the normalised name and the version of `name==version` or `name===version`."""
    name, _, version = pin.partition("==")
    return normal(name.strip()), version.lstrip("=").strip()


def read_hashes(path: Path = HASHES) -> Hashes:
    """Reads the file; empty if there is none."""
    found: Hashes = {}
    current: set[str] = set()
    for line in path.read_text().splitlines() if path.exists() else ():
        words = line.rstrip("\\").split()
        if words and "==" in words[0] and not line.startswith("#"):
            current = found.setdefault(key_of(words.pop(0)), set())
        current.update(word.removeprefix("--hash=sha256:") for word in words if word.startswith("--hash=sha256:"))
    return found


def locked(suffix: str) -> list[str]:
    """Returns the lines of one lock."""
    lines = (ROOT / f"constraints{suffix}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def write_hashes() -> None:
    """Writes the file for all locks."""
    before, found = read_hashes(), Hashes()
    for suffixes in ENVIRONMENTS:
        lines = sorted({line for suffix in suffixes for line in locked(suffix)})
        local = [line for line in lines if "+" in line.partition(";")[0]]
        others = [line for line in lines if line not in local]
        others += [f"{OTHER_CUDA}=={key_of(line)[1]}" for line in others if line.startswith("nixl-cu12==")]
        found |= digests(others)
        for line in local:
            found[key_of(line)] = torch_digests(line) or before.get(key_of(line), set())
        if missing := [line for line in lines if not found.get(key_of(line.partition(";")[0]))]:
            sys.exit(f"no wheel for Linux was found for: {', '.join(missing)}")
    head = "# Digests of the wheels for Linux of what constraints*.txt pin. Written by scripts/lock_hashes.py (`make lock`).\n"
    blocks = (
        " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{each}" for each in sorted(hashes))])
        for (name, version), hashes in sorted(found.items())
    )
    HASHES.write_text(head + "\n".join(blocks) + "\n")


def torch_digests(line: str) -> set[str]:
    """Returns the digests of a CPU build of torch; empty if PyTorch's index is not reachable."""
    try:
        return digests([line], "--index", TORCH_CPU_INDEX).get(key_of(line), set())
    except subprocess.CalledProcessError:
        print(f"{TORCH_CPU_INDEX} is not reachable: keeping the known digests of {line}", file=sys.stderr)
        return set()


def digests(lines: Iterable[str], *options: str) -> Hashes:
    """Asks the package index for the digests of exact versions, without resolving dependencies."""
    with tempfile.TemporaryDirectory() as folder:
        pins, lock = Path(folder) / "pins.txt", Path(folder) / "pylock.toml"
        pins.write_text("".join(f"{line}\n" for line in lines))
        command = [str(uv()), "pip", "compile", "--quiet", "--no-deps", "--universal", "--python-version", "3.11"]
        # Ignores the user's pip and uv settings, because they could add sources or pins.
        subprocess.run(
            [*command, "--no-config", *options, str(pins), "-o", str(lock)],
            check=True,
            env=uv_environment(),
            stderr=subprocess.DEVNULL if options else None,
        )
        packages = tomllib.loads(lock.read_text())["packages"]
    return {
        (normal(each["name"]), each["version"]): {
            wheel["hashes"]["sha256"] for wheel in each.get("wheels", ()) if is_wanted(_file_name(wheel))
        }
        for each in packages
    }


def is_wanted(wheel: str) -> bool:
    """Returns whether a wheel is for Linux and a supported Python, by its file name."""
    return bool(_PYTHON.search(wheel) and _PLATFORM.search(wheel))


def uv() -> Path:
    """Returns the path of uv. Installs it if it is missing."""
    tools = CACHE / "lock"
    if not (tools / "bin" / "uv").exists():
        venv.create(tools, with_pip=True)
        subprocess.run([str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", UV], check=True)
    return tools / "bin" / "uv"


def _file_name(wheel: Mapping[str, str]) -> str:
    return (wheel.get("name") or wheel.get("url") or wheel["path"]).rpartition("/")[2]


def uv_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("UV_")}


if __name__ == "__main__":
    write_hashes()
