"""Names, directories and state files of the meshes of one user on one machine."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.state import claim_place, default_name, find_mesh, running_meshes, state_dir
from kvmesh.errors import NotFoundError, UnavailableError
from tests.integration.mesh import command_line, descendants, process_state

UP = """
import os, sys, time
from kvmesh.cli.state import claim_place
with claim_place("demo", "") as place:
    (place.temporary / "socket").touch()
    if sys.argv[1:] == ["fork"] and os.fork() == 0:
        time.sleep(600)
    place.write_state(registry="http://r", url="http://u")
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the test a temporary directory of its own, for this process and its children."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("KVMESH_STATE", raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)


def test_a_second_mesh_gets_a_name_and_folders_of_its_own(tmp_path: Path) -> None:
    """The note gives the new name. The run directory is numbered too, whether it is the default or an explicit one."""
    with claim_place("demo", "") as first, claim_place("demo", "") as second, claim_place("other", "run/demo") as third:
        assert (first.name, first.run_dir, first.note) == ("demo", tmp_path / "run/demo", "")
        assert (second.name, second.run_dir) == ("demo-2", tmp_path / "run/demo-2")
        assert second.note == "a mesh named demo runs already; this one is demo-2"
        assert third.run_dir == tmp_path / "run/demo-3"
        assert "run/demo-3" in third.note
        assert len({first.temporary, second.temporary, third.temporary}) == 3
    with claim_place("demo", "") as again:
        assert again.name == "demo"
    assert not state_dir().exists()


def test_the_only_mesh_is_found_without_its_name() -> None:
    """The only running mesh is found without a name. If several run, the error lists them. A mesh that is starting has no address yet."""
    with pytest.raises(NotFoundError, match="no mesh of yours runs here; start one with `kvmesh up`, or give --url"):
        find_mesh("", otherwise="--url")
    with claim_place("one", "") as one:
        with pytest.raises(NotFoundError, match="the mesh one is still starting"):
            find_mesh("", otherwise="--url")
        one.write_state(registry="http://r1", url="http://u1")
        assert find_mesh("", otherwise="--url").url == "http://u1"
        with claim_place("two", "") as two:
            two.write_state(registry="http://r2", url="http://u2")
            assert find_mesh("two", otherwise="--url").registry == "http://r2"
            with pytest.raises(
                NotFoundError, match=r"2 meshes run here; choose one with --mesh NAME:\n  one  http://u1\n  two"
            ):
                find_mesh("", otherwise="--url")
            with pytest.raises(NotFoundError, match="no mesh is named three"):
                find_mesh("three", otherwise="--url")


@pytest.mark.parametrize("argv", [[], ["fork"]])
def test_a_killed_mesh_leaves_nothing(tmp_path: Path, argv: list[str]) -> None:
    """After SIGKILL the temporary directory is empty, the mesh is not listed, and its forked children have ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", UP, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdin is not None
    pid = int(process.stdout.readline())
    assert [mesh.pid for mesh in running_meshes()] == [pid]
    os.killpg(pid, signal.SIGKILL)
    process.wait()
    assert not running_meshes()
    # The process that cleans up inherits this output, so the output ends when that process does.
    assert process.stdout.read() == b""
    assert not any((tmp_path / "tmp").iterdir())
    process.stdin.close()
    process.stdout.close()


def test_the_last_mesh_ends_while_meshes_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that cleans up removes the state directory after this one has checked its owner. No mesh is listed then."""
    state_dir().mkdir()
    for name in ("listdir", "scandir"):
        read = getattr(os, name)

        def remove_first(path: str, read: Any = read) -> Any:
            if Path(path) == state_dir():
                state_dir().rmdir()
            return read(path)

        monkeypatch.setattr(os, name, remove_first)
    assert not running_meshes()
    assert not state_dir().exists()


def test_a_normal_end_leaves_no_helper(tmp_path: Path) -> None:
    """The process that cleans up has ended before the mesh does, although a forked child still holds its pipe."""
    process = subprocess.Popen(
        [sys.executable, "-c", UP, "fork"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    own = command_line(process.pid)
    started = descendants(process.pid)
    helpers = [pid for pid in started if command_line(pid) != own]
    assert helpers and len(started) > len(helpers)
    process.stdin.close()
    process.wait()
    left = [pid for pid in helpers if process_state(pid) != "Z"]
    os.killpg(process.pid, signal.SIGKILL)  # The forked child.
    process.stdout.close()
    assert not left
    assert not any((tmp_path / "tmp").iterdir())


def test_a_failure_to_create_the_run_directory_leaves_nothing(tmp_path: Path) -> None:
    """The temporary directory is removed, and the error names the flags."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(UnavailableError, match="see --run-dir and TMPDIR"),
        claim_place("one", str(tmp_path / "file/run")),
    ):
        pass
    assert not any((tmp_path / "tmp").iterdir())


def test_another_process_with_the_same_pid_is_not_a_mesh() -> None:
    """A state file whose process has another start time is ignored, because the kernel reuses process ids."""
    with claim_place("one", "") as place:
        (file,) = state_dir().glob("*/mesh.json")
        state = json.loads(file.read_text())
        file.write_text(json.dumps({**state, "started": state["started"] + 1}))
        assert not running_meshes()
        assert place.name == "one"


def test_meshes_of_other_users_are_not_read() -> None:
    """Meshes in a state directory that other users can write to are not listed, and no mesh is started in it."""
    state_dir().mkdir()
    state_dir().chmod(0o777)
    (state_dir() / "x").mkdir()
    state = {"name": "x", "registry": "r", "url": "u", "pid": os.getpid(), "started": 0, "run_dir": "d"}
    (state_dir() / "x" / "mesh.json").write_text(json.dumps(state))
    assert not running_meshes()
    with pytest.raises(UnavailableError, match="belongs to another user or is open to others"), claim_place("x", ""):
        pass


def test_a_variable_names_the_state_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that the variable names is the only state file."""
    monkeypatch.setenv("KVMESH_STATE", str(tmp_path / "own" / "mesh.json"))
    with claim_place("one", "") as place:
        assert not running_meshes()
        place.write_state(registry="r", url="u")
        assert [mesh.name for mesh in running_meshes()] == ["one"]
    assert not running_meshes()


def test_the_default_name_is_the_directory_and_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default name consists of the directory and the port, with characters that a shell would need quotes for replaced."""
    folder = tmp_path / "my clone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert (default_name(8000), default_name(0)) == ("my-clone-8000", "my-clone")
