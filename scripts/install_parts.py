"""Downloads servers and tools that tests use to `.cache/bin/`. As root, installs Docker, PostgreSQL, Chromium and systemd's tools.

Programs on PATH are used as they are. Otherwise, on Debian, the script downloads the package from the machine's own package archive and unpacks
it: it installs nothing on the machine, starts no service and needs no root. Debian 12 and later have no package of Consul; Debian 11's is one
static binary and runs there. The result, a path or the reason why there is none, goes to `.cache/parts.json`, where tests/parts.py reads it. A
part that is not available does not fail the script.

Only root can install programs that need more than one file, such as Docker. Tests start a Docker daemon if none runs.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from apt_sources import Archive, archives_of, release

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("KVMESH_CACHE") or ROOT / ".cache").absolute()
# Suite that has the package; None is the machine's own. Debian 12 builds Prometheus without Consul discovery, which the mesh's
# configuration (compose/prometheus) needs; Debian 11 builds it with Consul discovery.
PARTS: dict[str, str | None] = {
    "consul": "bullseye",
    "prometheus": "bullseye",
    "promtool": "bullseye",
    # Debian 12 has Compose 1 only. Tests use this one as a plug-in of the Docker client.
    "docker-compose": "trixie",
}
# The package of a part and the binary in it, if they are not `PART` and `usr/bin/PART`.
PACKAGES = {"promtool": "prometheus"}
PLACES = {"docker-compose": "usr/libexec/docker/cli-plugins/docker-compose"}

# Text that a usable binary must contain. A Prometheus without Consul discovery is not usable, nor is Compose 1.
NEEDED = {
    "prometheus": b"prometheus/discovery/consul",
    "promtool": b"prometheus/discovery/consul",
    "docker-compose": b"github.com/docker/compose/",
}


class UnavailablePart(Exception):
    """A part cannot be installed. The message is the reason that skipped tests print."""


def main() -> int:
    """Finds or downloads each part, and records the results in `.cache/parts.json`."""
    CACHE.mkdir(parents=True, exist_ok=True)
    outcome = {name: found_or_fetched(name, suite) for name, suite in PARTS.items()}
    outcome["postgres"] = found_or_installed("postgres", "postgresql", postgres_binary)
    outcome["systemd-analyze"] = found_or_installed("systemd-analyze", "systemd", lambda: which("systemd-analyze"))
    outcome["chromium"] = found_or_installed("chromium", "chromium", lambda: which("chromium"))
    outcome["docker"] = found_or_installed("docker", "docker.io", lambda: which("dockerd"))
    # Creates the base image of tests, which cannot reach an image registry.
    outcome["debootstrap"] = found_or_installed("debootstrap", "debootstrap", lambda: which("debootstrap"))
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
    except UnavailablePart as reason:
        say(f"no {name}: {reason}; tests that need it are skipped")
        return {"reason": str(reason)}
    return {"path": str(binary)}


def found_or_installed(name: str, package: str, find: Callable[[], Path | None]) -> dict[str, str]:
    """Like `found_or_fetched`, for a program that needs more than one file: only root can install it."""
    if find() is None and release().get("ID") == "debian" and os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"installing {package}")
        # Without a database cluster: tests create their own. Nothing is started or enabled either.
        disable_default_cluster()
        for command in (["apt-get", "-q", "update"], [*APT_INSTALL, package]):
            subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=APT_ENVIRONMENT, check=False)
    if (path := find()) is not None:
        return {"path": str(path)}
    reason = f"install the package {package} (as root: apt-get install {package})"
    say(f"no {name}: {reason}; tests that need it are skipped")
    return {"reason": reason}


APT_INSTALL = ["apt-get", "-q", "install", "-y", "--no-install-recommends"]
APT_ENVIRONMENT = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
CLUSTERS = Path("/etc/postgresql-common/createcluster.conf")


def disable_default_cluster() -> None:
    """Configures Debian's packages not to create a database cluster, which they would start."""
    if not CLUSTERS.exists():
        CLUSTERS.parent.mkdir(parents=True, exist_ok=True)
        CLUSTERS.write_text("create_main_cluster = false\n")


def which(name: str) -> Path | None:
    """Returns the path of a program on PATH."""
    found = shutil.which(name)
    return Path(found) if found else None


def postgres_binary() -> Path | None:
    """Returns the server program of the newest PostgreSQL. Debian does not put it on PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[4]))
    return found[-1] if found else which("postgres")


def is_fit(name: str, binary: Path) -> bool:
    """Returns whether an installed binary has the features that the tests need."""
    return name not in NEEDED or NEEDED[name] in binary.read_bytes()


def fetch(part: str, suite: str, binary: Path) -> None:
    """Installs a part's binary from the first archive that offers its package."""
    if release().get("ID") != "debian" or not shutil.which("apt-get"):
        raise UnavailablePart(f"not a Debian machine and no `{part}` on PATH; install {part} to run these tests")
    package = PACKAGES.get(part, part)
    say(f"fetching {part} of Debian {suite}")
    reason = UnavailablePart("no Debian archive among this machine's apt sources")
    for archive in archives_of(release().get("VERSION_CODENAME", "")):
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            try:
                return install(part, download(package, suite, archive, Path(folder)), binary)
            except UnavailablePart as why:
                reason = why
    raise reason


def install(part: str, unpacked: Path, binary: Path) -> None:
    """Copies the binary to `.cache/bin` if it runs on this machine."""
    new = unpacked / PLACES.get(part, f"usr/bin/{part}")
    works = new.exists() and subprocess.run([new, "--version"], capture_output=True, check=False).returncode == 0
    if not works:
        raise UnavailablePart(f"Debian's {part} does not run on this machine")
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
        # As root, apt would download as another user, who cannot write here.
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    apt = ["apt-get", "-q", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    run([*apt, "update"], folder)
    run([*apt, "download", package], folder)
    debs = list(folder.glob(f"{package}_*.deb"))
    if not debs:
        raise UnavailablePart(f"the archive has no package {package} in {suite}")
    run(["dpkg", "-x", str(debs[0]), str(folder / "unpacked")], folder)
    return folder / "unpacked"


def run(command: list[str], folder: Path) -> None:
    """Runs a command in a folder. Raises UnavailablePart with the last line of its output if it fails."""
    finished = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if finished.returncode != 0:
        said = (finished.stderr.strip() or finished.stdout.strip() or "no output").splitlines()
        raise UnavailablePart(f"{command[0]} {command[-1]}: {said[-1]}")


def say(text: str) -> None:
    """Prints one line about the progress."""
    print(f"kvmesh set-up: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
