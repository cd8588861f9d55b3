"""The meshes that `kvmesh up` runs for this user on this machine: a folder each, with a small file that other commands read.

The folder is also the temporary directory of the mesh's processes. A helper process removes it when `up` ends, even by SIGKILL.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path

from kvmesh.errors import NotFoundError, UnavailableError

STATE_FILE = "mesh.json"
CLAIM_ATTEMPTS = 10
"""Attempts to claim a place. The last mesh that ends removes the common folder, possibly during a claim."""
_CLEANER = 'while read -r line; do :; done; rm -rf -- "$1"; rmdir -- "$2" 2>/dev/null; exit 0'
"""The helper's program. Reads until every process with the pipe has ended: `up` and its children, which die with `up`.

It reads in the shell itself: another program would outlive a killed shell.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshState:
    """A running mesh.

    `url` is empty until it is ready. `started` is the kernel's start time of the process; it distinguishes a later process with the same
    id. 0: unknown. `is_joined`: it consists of workers that joined another mesh; commands do not list it separately.
    """

    name: str
    registry: str
    url: str
    pid: int
    started: int
    run_dir: str
    is_joined: bool = False
    credentials: str = ""
    """Folder with the credentials of an operator (`kvmesh/identity/credentials.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlace:
    """The name and folders reserved for one mesh. The environment variable KVMESH_STATE, if set, names the state file."""

    name: str
    run_dir: Path
    temporary: Path
    is_joined: bool = False
    note: str = ""
    """Why the name or the folder is not the requested one, as lines for people."""

    def write_state(self, *, registry: str = "", url: str = "", credentials: str = "") -> None:
        """Publishes the mesh's addresses to other commands."""
        pid = os.getpid()
        state = MeshState(
            name=self.name,
            registry=registry,
            url=url,
            pid=pid,
            started=_start_time(pid),
            run_dir=str(self.run_dir),
            is_joined=self.is_joined,
            credentials=credentials,
        )
        path = _own_file() or self.temporary / STATE_FILE
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{pid}")
        temporary.write_text(json.dumps(asdict(state)))
        temporary.replace(path)

    def remove_state(self) -> None:
        """Hides the mesh from other commands."""
        (_own_file() or self.temporary / STATE_FILE).unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """Removes the temporary directory, and the folder of all meshes after the last one."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        with suppress(OSError):
            self.temporary.parent.rmdir()


@contextmanager
def claim_place(name: str, run_dir: str, *, is_joined: bool = False) -> Iterator[MeshPlace]:
    """Reserves a name and a run directory that no running mesh of this user has, and a temporary directory for them.

    An empty `run_dir` is `run/NAME`. Number 2 and up is appended to what is taken. UnavailableError when a folder cannot be made.
    """
    try:
        place = _claim(name, run_dir=run_dir, is_joined=is_joined)
    except OSError as error:
        raise _not_created(error) from error
    try:
        # Logs are for this user only; so is the folder, unless it exists already.
        place.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        place.remove_temporary()
        raise _not_created(error) from error
    cleaner = subprocess.Popen(
        ["/bin/sh", "-c", _CLEANER, "kvmesh-cleaner", place.temporary, place.temporary.parent],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # A signal to the terminal's processes does not end it.
    )
    try:
        yield place
    finally:
        place.remove_state()
        place.remove_temporary()
        # Children that were forked and not used hold its pipe until this process ends.
        cleaner.kill()
        cleaner.communicate()


def _not_created(error: OSError) -> UnavailableError:
    return UnavailableError(f"{error.filename} cannot be created: {error.strerror}; see --run-dir and TMPDIR")


def _claim(name: str, run_dir: str, is_joined: bool) -> MeshPlace:
    for _ in range(CLAIM_ATTEMPTS):
        with suppress(FileNotFoundError), _locked(state_dir()):
            running = _running()
            own_name = _free(name, {mesh.name for mesh in running})
            own_dir = Path(_free(str(Path(run_dir or f"run/{own_name}").resolve()), {mesh.run_dir for mesh in running}))
            notes = []
            if own_name != name:
                notes.append(f"a mesh named {name} runs already; this one is {own_name}")
            if run_dir and own_dir != Path(run_dir).resolve():
                notes.append(f"a running mesh uses {run_dir}; this one's logs go to {own_dir}")
            temporary = Path(tempfile.mkdtemp(prefix="mesh-", dir=state_dir()))
            place = MeshPlace(
                name=own_name, run_dir=own_dir, temporary=temporary, is_joined=is_joined, note="; ".join(notes)
            )
            if _own_file() is None:
                place.write_state()
            return place
    raise UnavailableError(f"{state_dir()} was removed {CLAIM_ATTEMPTS} times while this mesh claimed a name in it")


def _free(wanted: str, taken: Collection[str]) -> str:
    return next(each for each in chain([wanted], (f"{wanted}-{number}" for number in count(2))) if each not in taken)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of claims. Raises UnavailableError if another user owns the folder and could read or replace its files."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        raise UnavailableError(f"{folder} belongs to another user or is open to others; remove it, or set TMPDIR")
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def state_dir() -> Path:
    """Returns the folder of all meshes of this user."""
    return Path(tempfile.gettempdir()) / f"kvmesh-{os.getuid()}"


def _own_file() -> Path | None:
    """Returns the state file that KVMESH_STATE names. It replaces those in the folder."""
    path = os.environ.get("KVMESH_STATE")
    return Path(path) if path else None


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def running_meshes() -> Sequence[MeshState]:
    """This user's meshes, starting ones included, in the order of their names."""
    return [mesh for mesh in _running() if not mesh.is_joined]


def _running() -> Sequence[MeshState]:
    """Also the workers that have joined one of them."""
    own = _own_file()
    if own is not None:
        files = [own]
    else:
        files = []
        # The last mesh that ends removes the folder at any time. `Path.glob` raises FileNotFoundError then.
        with suppress(FileNotFoundError):
            if _is_private(state_dir()):
                files = [state_dir() / name / STATE_FILE for name in os.listdir(state_dir())]
    found = [state for path in files if (state := _read(path)) is not None]
    return sorted(found, key=lambda state: state.name)


def find_mesh(name: str, *, otherwise: str) -> MeshState:
    """Returns the ready mesh with this name; with an empty name the only one. NotFoundError lists the running ones.

    `otherwise` is the flag that names an address instead.
    """
    running = running_meshes()
    ready = [mesh for mesh in running if mesh.url]
    fitting = [mesh for mesh in ready if name in ("", mesh.name)]
    if len(fitting) == 1:
        return fitting[0]
    if running and not ready:
        raise NotFoundError(f"the mesh {running[0].name} is still starting", reason="mesh_not_found")
    if not ready:
        raise NotFoundError(
            f"no mesh of yours runs here; start one with `kvmesh up`, or give {otherwise}", reason="mesh_not_found"
        )
    names = "".join(f"\n  {mesh.name}  {mesh.url}" for mesh in ready)
    problem = f"no mesh is named {name}" if name else f"{len(ready)} meshes run here"
    raise NotFoundError(f"{problem}; choose one with --mesh NAME:{names}", reason="mesh_not_found")


def default_name(port: int) -> str:
    """Makes a mesh's name from the directory and the port."""
    folder = re.sub(r"[^\w.-]+", "-", Path.cwd().name) or "mesh"
    return f"{folder}-{port}" if port else folder


def _read(path: Path) -> MeshState | None:
    """Reads a state file. Returns None if its mesh has ended."""
    try:
        state = MeshState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return state if _runs(state) else None


def _runs(state: MeshState) -> bool:
    try:
        os.kill(state.pid, 0)
    except OSError:  # It has ended, or the id belongs to another user's process.
        return False
    return _start_time(state.pid) == state.started


def _start_time(pid: int) -> int:
    try:
        # Field 22 of proc_pid_stat(5); the name in brackets, which may hold spaces, is the second.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
