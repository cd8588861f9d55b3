"""Tests of the services that `kvmesh up` forks, with real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvmesh.lifecycle.title import fitting_words
from tests.integration.mesh import is_running
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks are used on Linux only")

CHILD = """
import os, random, sys, time
if __name__ == "__main__":
    print(sys.argv[1:], os.environ.get("COLOUR"), os.getpid() == os.getsid(0), random.random(), flush=True)
    title = open("/proc/self/cmdline").read().split(chr(0))
    print("-m", "forked_child", *sys.argv[1:]) if title[1:5] == ["-m", "forked_child", *sys.argv[1:]] else print(title)
    if sys.argv[1] == "sleep":
        time.sleep(600)
    sys.exit(int(sys.argv[2]))
"""

PARENT = """
import asyncio, os, signal, sys, threading, time
from pathlib import Path
from kvmesh.cli.children import ChildSpec
from kvmesh.cli.forked import fork_all

folder, what = Path(sys.argv[1]), sys.argv[2]
if what == "thread":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
forked = fork_all(["a", "b"], ["forked_child.__main__", "no_such_module"])

def start(name, *argv):
    spec = ChildSpec(name=name, module="forked_child", argv=argv, env={"COLOUR": name}, log_path=folder / name)
    return forked[name].start(spec)

async def run():
    children = [start("a", "exit", "0"), start("b", "exit", "7")]
    for child in children:
        await child.exited.wait()
    print(*(child.status for child in children))

async def stop():
    child = start("a", "sleep", "0")
    while not (folder / "a").exists() or "sleep" not in (folder / "a").read_text():
        await asyncio.sleep(0.01)
    await child.stop(600)
    print(child.status)

print(*(each.pid for each in forked.values()), flush=True)
if what == "hold":
    time.sleep(600)
if what in ("run", "stop"):
    asyncio.run({"run": run, "stop": stop}[what]())
"""


def parent(folder: Path, what: str, code: str = CHILD, **env: str) -> "subprocess.Popen[str]":
    """Starts a process that forks two children, prints their process ids on its first line, and then runs the action `what`."""
    (folder / "forked_child").mkdir()
    (folder / "forked_child" / "__init__.py").touch()
    (folder / "forked_child" / "__main__.py").write_text(code)
    path = os.pathsep.join([str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    # The command line is as long as that of a mesh, because the titles of forks must fit into it.
    argv = [sys.executable, "-c", PARENT, str(folder), what]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path, **env})


def lines(process: "subprocess.Popen[str]") -> list[str]:
    """Waits for a successful end and returns the lines of the output."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return output.splitlines()


def wait_gone(pids: list[int]) -> None:
    """Waits until none of the processes runs."""
    ends_at_s = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < ends_at_s
        time.sleep(0.01)


def test_each_fork_runs_its_spec_like_a_separate_program(tmp_path: Path) -> None:
    """Each fork has its own arguments, environment, log, exit status, session, title and random numbers."""
    assert lines(parent(tmp_path, "run"))[1:] == ["0 7"]
    random_numbers = {}
    for name, argv in (("a", ["exit", "0"]), ("b", ["exit", "7"])):
        first, second = (tmp_path / name).read_text().splitlines()
        assert first.startswith(f"{argv} {name} True ")
        assert second == " ".join(["-m", "forked_child", *argv])
        random_numbers[name] = first.split()[-1]
    assert random_numbers["a"] != random_numbers["b"]


def test_the_status_of_a_stopped_fork_is_the_signal(tmp_path: Path) -> None:
    """The status of a stopped fork is the negative signal number. The other fork, which has not received a spec, ends with its parent."""
    first, second = lines(parent(tmp_path, "stop"))
    assert second == str(-signal.SIGTERM)
    wait_gone([int(word) for word in first.split()])


def test_forks_without_a_spec_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    """Forks that wait for a spec end when their parent is killed, which cannot stop them itself."""
    process = parent(tmp_path, "hold")
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.communicate()
    wait_gone(pids)


def test_nothing_is_forked_while_threads_run(tmp_path: Path) -> None:
    """A fork copies the locks of other threads but not the threads, so the services start as separate programs."""
    assert lines(parent(tmp_path, "thread")) == [""]


UP = """
from kvmesh.cli.up import fork_services
from kvmesh.cli.up_settings import UpSettings

print(*fork_services(UpSettings(engine="simulated")))
"""


def test_the_services_of_a_simulated_mesh_are_forked() -> None:
    """Forking needs a process without other threads, so the modules that `kvmesh up` imports start none, as numpy would."""
    done = subprocess.run([sys.executable, "-c", UP], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split() == ["prefill-0", "decode-0", "gateway-0", "planner-0"], done.stderr


def test_a_title_has_whole_words_only() -> None:
    """A process title has whole words only, so that a search in the process list does not match half of a word."""
    assert fitting_words(["ab", "cd"], 6) == b"ab\0cd\0"
    assert fitting_words(["ab", "cd"], 5) == b"ab\0"
    assert fitting_words(["ab"], 2) == b""


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"])
def test_thread_count_variables_do_not_prevent_forks(tmp_path: Path, name: str) -> None:
    """numpy starts that many threads on import. The children still see the user's value."""
    code = "import os\nimport numpy\nif __name__ == '__main__':\n    print(os.environ['" + name + "'])\n"
    process = parent(tmp_path, "run", code, **{name: "3"})
    assert lines(process)[1:] == ["0 0"]
    assert (tmp_path / "a").read_text() == "3\n"
