"""Downloads the servers that tests use, Consul and Prometheus, to `.cache/bin/`.

What is on PATH is used as it is. Otherwise, on Debian, the package is downloaded from the machine's own package archive
and unpacked: nothing is installed on the machine, no service starts, and it needs no root. Debian 12 and later have no
package of Consul; Debian 11's is one static binary and runs there. The outcome, a path or the reason why there is
none, goes to `.cache/parts.json`, where tests/parts.py reads it. A part that cannot be had is no failure here.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from apt_sources import Archive, archives_of, release

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("KVMESH_CACHE") or ROOT / ".cache").absolute()
# Suite that has the package; None is the machine's own. Debian 12 builds Prometheus without Consul discovery, which the mesh's
# configuration needs (compose/prometheus); Debian 11 builds it with.
PARTS: dict[str, str | None] = {"consul": "bullseye", "prometheus": "bullseye"}


# What a binary must contain to be of use: a Prometheus built without Consul discovery is not.
NEEDED = {"prometheus": b"prometheus/discovery/consul"}


class CannotHave(Exception):
    """A part cannot be installed. The message is the reason that skipped tests print."""


def main() -> int:
    """Finds or downloads each part, and records the results in `.cache/parts.json`."""
    CACHE.mkdir(parents=True, exist_ok=True)
    outcome = {name: found_or_fetched(name, suite) for name, suite in PARTS.items()}
    (CACHE / "parts.json").write_text(json.dumps(outcome, indent=2) + "\n")
    return 0


def found_or_fetched(name: str, suite: str | None) -> dict[str, str]:
    """Returns `{"path": ...}`, or `{"reason": ...}` if the part cannot be installed."""
    binary = CACHE / "bin" / name
    for known in (shutil.which(name), binary):
        if known and Path(known).exists() and is_fit(name, Path(known)):
            return {"path": str(known)}
    try:
        fetch(name, suite or release().get("VERSION_CODENAME", ""), binary)
    except CannotHave as reason:
        say(f"no {name}: {reason}; tests that need it are skipped")
        return {"reason": str(reason)}
    return {"path": str(binary)}


def is_fit(name: str, binary: Path) -> bool:
    """True if an installed binary has the features that the tests need."""
    return name not in NEEDED or NEEDED[name] in binary.read_bytes()


def fetch(package: str, suite: str, binary: Path) -> None:
    """Installs the binary of a package, which has the package's name, from the first archive that offers it."""
    if release().get("ID") != "debian" or not shutil.which("apt-get"):
        raise CannotHave(f"not a Debian machine and no `{package}` on PATH; install {package} to run these tests")
    say(f"fetching {package} of Debian {suite}")
    reason = CannotHave("no Debian archive among this machine's apt sources")
    for archive in archives_of(release().get("VERSION_CODENAME", "")):
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            try:
                return install(package, download(package, suite, archive, Path(folder)), binary)
            except CannotHave as why:
                reason = why
    raise reason


def install(package: str, unpacked: Path, binary: Path) -> None:
    """Copies the binary to `.cache/bin` if it runs on this machine."""
    new = unpacked / "usr" / "bin" / package
    works = new.exists() and subprocess.run([new, "--version"], capture_output=True, check=False).returncode == 0
    if not works:
        raise CannotHave(f"the package {package} does not run on this machine")
    binary.parent.mkdir(parents=True, exist_ok=True)
    new.replace(binary)


def download(package: str, suite: str, archive: Archive, folder: Path) -> Path:
    """Unpacks a package, with a separate apt configuration that does not change the machine's package lists."""
    for name in ("lists/partial", "cache/archives/partial", "unpacked"):
        (folder / name).mkdir(parents=True)
    (folder / "sources.list").write_text(f"deb {archive.options}{archive.uri} {suite} main\n")
    options = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        # As root, apt would fetch as a user of its own, who cannot write here.
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    apt = ["apt-get", "-q", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    run([*apt, "update"], folder)
    run([*apt, "download", package], folder)
    debs = list(folder.glob(f"{package}_*.deb"))
    if not debs:
        raise CannotHave(f"the archive has no package {package} in {suite}")
    run(["dpkg", "-x", str(debs[0]), str(folder / "unpacked")], folder)
    return folder / "unpacked"


def run(command: list[str], folder: Path) -> None:
    """Runs a command in a folder. Raises CannotHave with the last line of its output if it fails."""
    finished = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if finished.returncode != 0:
        said = (finished.stderr.strip() or finished.stdout.strip() or "no output").splitlines()
        raise CannotHave(f"{command[0]} {command[-1]}: {said[-1]}")


def say(text: str) -> None:
    """Prints one line about the progress."""
    print(f"kvmesh set-up: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
