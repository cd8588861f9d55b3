"""Services as forks of `kvmesh up`, with real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvmesh.lifecycle.title import fitting_words
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
    await child.stop(5)
    print(child.status)

print(*(each.pid for each in forked.values()), flush=True)
if what == "hold":
    time.sleep(600)
if what in ("run", "stop"):
    asyncio.run({"run": run, "stop": stop}[what]())
"""


def parent(folder: Path, what: str, code: str = CHILD, **env: str) -> "subprocess.Popen[str]":
    """A process that has forked two others, whose ids are its first line, and does something with them."""
    (folder / "forked_child").mkdir()
    (folder / "forked_child" / "__init__.py").touch()
    (folder / "forked_child" / "__main__.py").write_text(code)
    path = os.pathsep.join([str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    # As long as the command line of a mesh, which is what a title has room in.
    argv = [sys.executable, "-c", PARENT, str(folder), what]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path, **env})


def lines(process: "subprocess.Popen[str]") -> list[str]:
    """What it wrote, once it has ended well."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return output.splitlines()


def wait_gone(pids: list[int]) -> None:
    """Until none of them runs."""
    ends_at_s = time.monotonic() + PATIENCE_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < ends_at_s
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_runs_its_order_as_a_program_of_its_own(tmp_path: Path) -> None:
    """Arguments, environment, log, exit status, session, title and random numbers are its own."""
    assert lines(parent(tmp_path, "run"))[1:] == ["0 7"]
    told = {}
    for name, argv in (("a", ["exit", "0"]), ("b", ["exit", "7"])):
        first, second = (tmp_path / name).read_text().splitlines()
        assert first.startswith(f"{argv} {name} True ")
        assert second == " ".join(["-m", "forked_child", *argv])
        told[name] = first.split()[-1]
    assert told["a"] != told["b"]


def test_one_that_is_stopped_tells_the_signal(tmp_path: Path) -> None:
    """As a status below zero; the other one, which has no order yet, ends with its parent."""
    first, second = lines(parent(tmp_path, "stop"))
    assert second == str(-signal.SIGTERM)
    wait_gone([int(word) for word in first.split()])


def test_who_waits_for_an_order_dies_with_the_parent(tmp_path: Path) -> None:
    """Killed, it has no chance to tell them."""
    process = parent(tmp_path, "hold")
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.communicate()
    wait_gone(pids)


def test_nothing_is_forked_while_threads_run(tmp_path: Path) -> None:
    """A fork would copy their locks, not them: the services are started as programs."""
    assert lines(parent(tmp_path, "thread")) == [""]


UP = """
from kvmesh.cli.up import fork_services
from kvmesh.cli.up_settings import UpSettings

print(*fork_services(UpSettings(engine="simulated")))
"""


def test_the_services_of_a_simulated_mesh_are_forks() -> None:
    """Nothing that `kvmesh up` imports starts a thread, as numpy would."""
    done = subprocess.run([sys.executable, "-c", UP], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split() == ["prefill-0", "decode-0", "gateway-0", "planner-0"], done.stderr


def test_a_title_has_whole_words_only() -> None:
    """Who looks for a word does not find the half of it."""
    assert fitting_words(["ab", "cd"], 6) == b"ab\0cd\0"
    assert fitting_words(["ab", "cd"], 5) == b"ab\0"
    assert fitting_words(["ab"], 2) == b""


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"])
def test_the_users_thread_counts_do_not_end_the_forks(tmp_path: Path, name: str) -> None:
    """numpy starts so many threads when it is imported; a child sees the user's value again."""
    code = "import os\nimport numpy\nif __name__ == '__main__':\n    print(os.environ['" + name + "'])\n"
    process = parent(tmp_path, "run", code, **{name: "3"})
    assert lines(process)[1:] == ["0 0"]
    assert (tmp_path / "a").read_text() == "3\n"
