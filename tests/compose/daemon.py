"""Provides a Docker daemon for tests, either the machine's or one that the tests start and end, and a base image that needs no registry."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from apt_sources import archives_of, release

from tests.parts import CACHE, is_required, require_part
from tests.patience import PATIENCE_S

BASE_IMAGE = "kvmesh-test-base:bookworm"
BASE_SUITE = "bookworm"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
FOLDER = CACHE.absolute() / "compose"
NOT_ALLOWED = ("permission denied", "operation not permitted", "not supported", "read-only file system")
"""Messages of a daemon that the machine does not allow, such as in a container without privileges."""
LEFT_OUT = "./proc/* ./sys/* ./dev/* ./var/cache/apt/* ./var/lib/apt/lists/* ./usr/share/doc/* ./usr/share/man/* ./usr/share/locale/*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Docker:
    """A running daemon. `environment` makes Docker clients and Compose use it."""

    environment: Mapping[str, str]

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        """Runs `docker COMMAND` and returns its output. Raises AssertionError with its errors if it fails and `check` is set."""
        finished = subprocess.run(
            ["docker", *command],
            env={**os.environ, **self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0 or not check, f"docker {' '.join(command)}\n{finished.stderr[-3000:]}"
        return finished.stdout

    def answers(self) -> bool:
        """Returns whether the daemon answers."""
        return bool(self.run("info", "--format", "{{.ServerVersion}}", check=False).strip())


@contextmanager
def docker_daemon() -> Iterator[Docker]:
    """Yields the machine's daemon, or starts one with its data in the cache. Skips the test if neither is possible."""
    require_part("docker")
    FOLDER.mkdir(parents=True, exist_ok=True)
    plugin = FOLDER / "config" / "cli-plugins" / "docker-compose"
    plugin.parent.mkdir(parents=True, exist_ok=True)
    # Replaces the file instead of writing it, because it may be running.
    shutil.copy2(require_part("docker-compose"), plugin.with_suffix(".new"))
    plugin.with_suffix(".new").replace(plugin)
    docker = Docker(environment={"DOCKER_CONFIG": str(FOLDER / "config")})
    if docker.answers():
        yield docker
        return
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        pytest.skip("no Docker daemon answers, and only root can start one")
    # Two daemons on one data root break each other: containerd of the second one does not start.
    with (FOLDER / "daemon.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pytest.fail(f"another run of the tests has a Docker daemon on {FOLDER / 'docker'}")
        with tempfile.TemporaryDirectory(prefix="kvmesh-docker-") as folder, own_daemon(Path(folder)) as own:
            yield own


@contextmanager
def own_daemon(folder: Path) -> Iterator[Docker]:
    """Starts a daemon. Ends it with all its containers on exit."""
    address = f"unix://{folder}/docker.sock"
    docker = Docker(environment={"DOCKER_CONFIG": str(FOLDER / "config"), "DOCKER_HOST": address})
    flags = ["--host", address, "--data-root", str(FOLDER / "docker"), "--exec-root", str(folder / "exec")]
    # The daemon stops its containers on SIGTERM, which it also gets if the tests' process dies.
    guard = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    log = folder / "dockerd.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*guard, "dockerd", *flags, "--pidfile", str(folder / "pid")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        wait_for_daemon(docker, process, log)
        yield docker
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_daemon(docker: Docker, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Waits until the daemon answers. Skips the test with the daemon's error if the machine does not allow one, or if none is required."""
    deadline = time.monotonic() + PATIENCE_S
    while not docker.answers():
        if process.poll() is not None or time.monotonic() > deadline:
            error = error_of(log.read_text(errors="replace"))
            (pytest.fail if is_required() and not is_refused(error) else pytest.skip)(
                f"no Docker daemon can run: {error}"
            )
        time.sleep(0.2)


def error_of(log: str) -> str:
    """Returns the daemon's last output after the lines of its log, which begin with a time. It may have several lines."""
    return re.split(r"^time=.*\n?", log, flags=re.MULTILINE)[-1].strip() or "it does not answer"


def is_refused(error: str) -> bool:
    """Returns whether the machine does not allow a daemon. Other errors, such as a second daemon on the data root, are defects of the tests."""
    return any(each in error.lower() for each in NOT_ALLOWED)


def make_base_image(docker: Docker) -> None:
    """Imports a Debian with Python as BASE_IMAGE, unless the daemon has it. Keeps the archive in the cache."""
    if docker.run("image", "ls", "--quiet", BASE_IMAGE).strip():
        return
    archive = FOLDER / "base.tar"
    if not archive.exists():
        require_part("debootstrap")
        if os.geteuid() != 0:
            pytest.skip("only root can make a base image")
        bootstrap(archive)
    docker.run("import", str(archive), BASE_IMAGE)


def bootstrap(archive: Path) -> None:
    """Creates a minimal Debian in memory, which is twice as fast as on a disk, and packs it."""
    codename = release().get("VERSION_CODENAME", "")
    mirror = next((each.uri for each in archives_of(codename)), "http://deb.debian.org/debian")
    left_out = " ".join(f"--exclude='{each}'" for each in LEFT_OUT.split())
    script = (
        'mount -t tmpfs -o size=2g tmpfs "$1" && debootstrap --variant=minbase --include="$2" "$3" "$1/root" "$4" >&2'
        f' && tar -C "$1/root" {left_out} -cf "$5.part" . && mv "$5.part" "$5"'
    )
    with tempfile.TemporaryDirectory(prefix="kvmesh-base-") as folder:
        arguments: Sequence[str] = (folder, BASE_PACKAGES, BASE_SUITE, mirror, str(archive))
        finished = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", script, "sh", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    assert finished.returncode == 0, f"debootstrap failed\n{finished.stderr[-2000:]}"
