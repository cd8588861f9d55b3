"""Where the mesh of this machine is: a small file that `up` writes and the other commands read."""

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshState:
    """Addresses of a running mesh."""

    registry: str
    url: str
    pid: int


def state_path() -> Path:
    """One file per user; KVMESH_STATE names another."""
    if path := os.environ.get("KVMESH_STATE"):
        return Path(path)
    root = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(root) / f"kvmesh-{os.getuid()}" / "mesh.json"


def write_state(state: MeshState) -> None:
    """Tells other commands where the mesh is."""
    path = state_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(state)))
    temporary.replace(path)


def read_state() -> MeshState | None:
    """Where the mesh is, or None when none runs."""
    try:
        state = MeshState(**json.loads(state_path().read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return state if _is_alive(state.pid) else None


def remove_state(pid: int) -> None:
    """Forgets the mesh, if it is this process's."""
    state = read_state()
    if state is None or state.pid == pid:
        with contextlib.suppress(FileNotFoundError):
            state_path().unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
