"""Runs the README's two commands from a fresh clone on a minimal Debian: python3, make, git and certificates only.

    python3 scripts/try_in_container.py                           both commands, as root and as a normal user
    python3 scripts/try_in_container.py --part up --user root     `make up` only, as root
    python3 scripts/try_in_container.py --run "KVMESH_ENGINE_BUILD=none make up ARGS=--once"    any other command

Each user gets a fresh container: with Docker if a daemon has the image or can pull it, otherwise with debootstrap and chroot (as root; with its
own mount and process namespaces and the machine's network). The clone contains the committed files. The container gets this machine's settings
of pip, apt, proxies and certificates. For the normal user, the script runs the command that set-up prints for missing system packages as root,
then repeats the first command, as a person would.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from apt_sources import archives_of, release

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("python3", "make", "git", "ca-certificates")
DEBIAN = "http://deb.debian.org/debian"
USER_ID = 4242
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
ADVICE = re.compile(r"^ +sudo (apt-get install .+)$", re.MULTILINE)
"""The command that set-up prints when system packages are missing."""
PARTS = {"up": 'make up ARGS="--once {up}"', "test": 'make test ARGS="{test}"'}


class Container(Protocol):
    """A minimal Debian that runs shell commands."""

    def run(self, command: str, *, user: str) -> tuple[int, str]:
        """Runs a command and prints its output. Returns the exit status and the output."""
        ...


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="bookworm", help="Debian release (default: bookworm)")
    parser.add_argument("--part", choices=("up", "test", "both"), default="both")
    parser.add_argument("--user", choices=("root", "normal", "both"), default="both")
    parser.add_argument("--up", default="", metavar="ARGS", help="more flags of kvmesh up, such as '--port 0'")
    parser.add_argument("--test", default="", metavar="ARGS", help="arguments of pytest, such as tests/unit")
    parser.add_argument("--run", action="append", metavar="COMMAND", help="run this command instead; may be repeated")
    parser.add_argument("--packages", default="", help="more Debian packages to install first, comma-separated")
    parser.add_argument(
        "--base", type=Path, help="tar archive of a bootstrapped system; used if it exists, otherwise written"
    )
    options = parser.parse_args()
    parts = list(PARTS) if options.part == "both" else [options.part]
    commands = options.run or [PARTS[part].format(up=options.up, test=options.test) for part in parts]
    packages = (*PACKAGES, *options.packages.split(",")) if options.packages else PACKAGES
    failed = False
    for user in ("root", "normal") if options.user == "both" else (options.user,):
        with ExitStack() as stack:
            if has_image(f"debian:{options.suite}-slim"):
                container: Container = stack.enter_context(docker(options.suite, packages))
            else:
                container = stack.enter_context(chroot(options.suite, packages, options.base))
            failed = not all(run_as_newcomer(container, command, user) for command in commands) or failed
    return int(failed)


def run_as_newcomer(container: Container, command: str, user: str) -> bool:
    """Runs a command in the clone. Installs the packages that its output asks for and runs it once more. Returns whether it succeeded."""
    started = time.monotonic()
    status, output = container.run(f"cd /home/kvmesh/clone && {command}", user=user)
    if status != 0 and (advice := ADVICE.search(output)):
        container.run(f"apt-get update -qq && {advice[1]}", user="root")
        status, _ = container.run(f"cd /home/kvmesh/clone && {command}", user=user)
    result = "passed" if status == 0 else f"FAILED (status {status})"
    print(f"== {user}: {command}: {result} after {time.monotonic() - started:.0f} s", flush=True)
    return status == 0


def has_image(image: str) -> bool:
    """Returns whether a Docker daemon answers that has the image or can pull it."""
    if not shutil.which("docker"):
        return False
    commands = (["docker", "image", "inspect", image], ["docker", "pull", "--quiet", image])
    return any(subprocess.run(each, capture_output=True, check=False).returncode == 0 for each in commands)


class Chroot:
    """A system in a folder. Every command has its own mounts and process ids, which vanish when it ends."""

    def __init__(self, folder: Path, shared: Sequence[Path]) -> None:
        self._folder = folder
        self._shared = shared

    def run(self, command: str, *, user: str) -> tuple[int, str]:
        folder = shlex.quote(str(self._folder))
        # The root is a mount that replaces the machine's: in a plain chroot, commands can neither unshare their mounts nor run containers.
        root = f"mount --bind {folder} {folder}"
        enter = f"cd {folder} && mkdir -p .outside && pivot_root . .outside && cd / && umount -l /.outside && rmdir /.outside"
        binds = [
            f"mkdir -p {folder}{path} && mount --rbind {path} {folder}{path}"
            for path in ("/dev", "/sys", *self._shared)
        ]
        identity = "0:0" if user == "root" else f"{USER_ID}:{USER_ID}"
        home = "/root" if user == "root" else "/home/kvmesh"
        inner = f"env -i HOME={home} {shlex.join(environment())} sh -c {shlex.quote(command)}"
        script = " && ".join(
            [root, *binds, f"mount -t proc proc {folder}/proc", enter, f"exec chroot --userspec={identity} / {inner}"]
        )
        return printed_run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script], command)


class Docker:
    """A container that waits for commands."""

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, command: str, *, user: str) -> tuple[int, str]:
        who = "0" if user == "root" else str(USER_ID)
        home = "/root" if user == "root" else "/home/kvmesh"
        variables = [word for pair in (f"HOME={home}", *environment()) for word in ("--env", pair)]
        return printed_run(["docker", "exec", "--user", who, *variables, self._name, "sh", "-c", command], command)


@contextmanager
def chroot(suite: str, packages: Sequence[str], base: Path | None) -> Iterator[Chroot]:
    """Creates a new system by debootstrap or from `base`. Removes it on exit."""
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        sys.exit(
            "no Docker daemon answers; without one this script needs root and debootstrap (apt-get install debootstrap)"
        )
    with tempfile.TemporaryDirectory(prefix="kvmesh-container-") as name:
        # TemporaryDirectory creates 0700 folders, which a normal user inside could not enter.
        folder = Path(name) / "root"
        folder.mkdir(mode=0o755)
        if base and base.exists():
            subprocess.run(["tar", "-C", folder, "-xf", base], check=True)
        else:
            include = f"--include={','.join(packages)}"
            subprocess.run(["debootstrap", "--variant=minbase", include, suite, folder, debian_mirror()], check=True)
            if base:
                subprocess.run(["tar", "-C", folder, "-cf", base, "."], check=True)
        shared = copy_machine_settings(folder)
        clone_into(folder / "home" / "kvmesh")
        container = Chroot(folder, shared)
        container.run(f"useradd --uid {USER_ID} --no-create-home kvmesh && chown -R kvmesh /home/kvmesh", user="root")
        yield container


@contextmanager
def docker(suite: str, packages: Sequence[str]) -> Iterator[Docker]:
    """Starts a new container of Debian's slim image. Removes it on exit."""
    name = f"kvmesh-newcomer-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="kvmesh-container-") as folder:
        shared = copy_machine_settings(Path(folder))
        clone_into(Path(folder) / "home" / "kvmesh")
        volumes = [word for path in shared for word in ("--volume", f"{path}:{path}:ro")]
        start = ["docker", "run", "--detach", "--init", "--network", "host", "--name", name, *volumes]
        subprocess.run([*start, f"debian:{suite}-slim", "sleep", "infinity"], check=True)
        try:
            container = Docker(name)
            container.run(f"apt-get update -qq && apt-get install -y -qq {' '.join(packages)}", user="root")
            subprocess.run(["docker", "cp", f"{folder}/.", f"{name}:/"], check=True)
            container.run(f"useradd --uid {USER_ID} kvmesh; chown -R kvmesh /home/kvmesh", user="root")
            yield container
        finally:
            subprocess.run(["docker", "rm", "--force", name], check=False, stdout=subprocess.DEVNULL)


def clone_into(home: Path) -> None:
    """Creates the bare clone, without this machine's git hooks and settings."""
    home.mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, home / "clone"], check=True)


def debian_mirror() -> str:
    """Returns the machine's own mirror if the machine runs Debian."""
    codename = release().get("VERSION_CODENAME", "") if release().get("ID") == "debian" else ""
    return next((archive.uri for archive in archives_of(codename)), DEBIAN)


def environment() -> Sequence[str]:
    """Returns the environment of a person's shell, with this machine's proxies."""
    proxies = [f"{name}={value}" for name, value in os.environ.items() if name.lower().endswith("_proxy")]
    return ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", *proxies)


def copy_machine_settings(folder: Path) -> list[Path]:
    """Copies this machine's host names, name servers, certificates and pip settings, with the files that they name, into a system.

    Returns local folders that pip's settings name.
    """
    for path in (Path("/etc/resolv.conf"), Path("/etc/hosts"), CERTIFICATES):
        copy_into(folder, path)
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        # ":env:" are PIP_* variables; settings of one command go to all.
        settings[key.rpartition(".")[2]] = str(json.loads(value.replace("'", '"')))
    text = "".join(f"{key} = {value}\n" for key, value in settings.items())
    (folder / "etc").mkdir(exist_ok=True)
    (folder / "etc" / "pip.conf").write_text(f"[global]\n{text}")
    folders = []
    for word in " ".join(settings.values()).split():
        path = Path(urlsplit(word).path)
        if word.startswith("/"):
            copy_into(folder, path)
        if path.is_absolute() and path.is_dir() and urlsplit(word).scheme in ("", "file"):
            # The pages of an index in a folder link to files beside it.
            folders.append(path.parent if word.startswith("file:") else path)
    return sorted(set(folders))


def copy_into(folder: Path, path: Path) -> None:
    """Copies a file of this machine to the same path of another system. Ignores paths that are no file."""
    if path.is_file():
        (folder / path.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path.relative_to("/"))


def printed_run(command: Sequence[str], text: str) -> tuple[int, str]:
    """Runs a command and prints its output as it arrives. Returns the exit status and the output."""
    print(f"== {text}", flush=True)
    output = []
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"   {line}", end="", flush=True)
            output.append(line)
    return process.returncode, "".join(output)


if __name__ == "__main__":
    sys.exit(main())
