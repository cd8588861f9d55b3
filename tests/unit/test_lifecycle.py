"""The lifecycle of parts on virtual time: they start in order, stop in reverse order, and every wait has a limit."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest

from kvmesh.lifecycle import (
    LifecycleSettings,
    PartFailedError,
    run,
    run_parts,
    run_until_signalled,
    stop_on_signals,
)
from tests.integration.mesh import is_running
from tests.patience import PATIENCE_S
from tests.virtual_loop import run_virtual

SETTINGS = LifecycleSettings(start_timeout_s=100, drain_timeout_s=50)


async def nothing() -> None:
    pass


async def forever() -> None:
    await asyncio.Event().wait()


async def stubborn() -> None:
    """Keeps running for a while after a cancellation."""
    try:
        await forever()
    except asyncio.CancelledError:
        await asyncio.sleep(1000)
        raise


def failing(words: str) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise RuntimeError(words)

    return fail


class CallLog(list[str]):
    """Collects the calls of its parts, and makes these parts."""

    def part(
        self,
        name: str,
        *,
        start: Callable[[], Awaitable[None]] = nothing,
        close: Callable[[], Awaitable[None]] = nothing,
    ) -> "Written":
        return Written(call_log=self, name=name, start=start, close=close)

    def at(self, words: str) -> None:
        self.append(f"{words} {asyncio.get_running_loop().time():g}")


class Written:
    """A part that records its calls in the log."""

    def __init__(
        self, call_log: CallLog, name: str, start: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]]
    ) -> None:
        self.call_log, self.name, self._start, self._close = call_log, name, start, close

    async def start(self) -> None:
        self.call_log.append(f"start {self.name}")
        await self._start()

    async def aclose(self) -> None:
        self.call_log.at(f"close {self.name}")
        await self._close()


class Running(Written):
    """A part with a body that runs until it is cancelled or fails."""

    body: Callable[[], Awaitable[None]] = staticmethod(forever)

    async def run(self) -> None:
        try:
            await self.body()
        finally:
            self.call_log.append(f"ran {self.name}")


def test_the_order_of_a_lifecycle() -> None:
    """Parts start in order, and close in reverse order after the drain."""
    call_log = CallLog()

    async def main() -> None:
        stop = asyncio.Event()

        async def ready() -> None:
            call_log.append("ready")
            asyncio.get_running_loop().call_later(5, stop.set)

        async def drain() -> None:
            await asyncio.sleep(3)
            call_log.append("drained")

        running = Running(call_log, "b", nothing, nothing)
        await run_parts(
            [call_log.part("a"), running, call_log.part("c")], stop=stop, on_ready=ready, drain=drain, settings=SETTINGS
        )

    run_virtual(main())
    assert call_log == [
        "start a",
        "start b",
        "start c",
        "ready",
        "drained",
        "close c 8",
        "close b 8",
        "ran b",
        "close a 8",
    ]


def test_a_part_that_cannot_start() -> None:
    """Started parts are closed, including the failed one. Later parts are never started, and the error has the cause."""
    call_log = CallLog()
    parts = [call_log.part("a"), call_log.part("b", start=failing("no")), call_log.part("c")]
    with pytest.raises(PartFailedError, match="Written failed while starting") as caught:
        run_virtual(run_parts(parts, stop=asyncio.Event(), settings=SETTINGS))
    assert str(caught.value.__cause__) == "no"
    assert call_log == ["start a", "start b", "close b 0", "close a 0"]


def test_a_start_that_hangs_times_out() -> None:
    """A start that hangs ends at its timeout, which is the cause of the error."""
    call_log = CallLog()
    with pytest.raises(PartFailedError) as caught:
        run_virtual(run_parts([call_log.part("a", start=forever)], stop=asyncio.Event(), settings=SETTINGS))
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert call_log == ["start a", "close a 100"]


def test_stop_while_starting() -> None:
    """A stop does not wait for a slow start."""
    call_log = CallLog()

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(2, stop.set)
        await run_parts([call_log.part("a"), call_log.part("b", start=forever)], stop=stop, settings=SETTINGS)

    run_virtual(main())
    assert call_log == ["start a", "start b", "close b 2", "close a 2"]


def test_a_part_that_fails_while_running_stops_everything() -> None:
    """The failure of a running part is raised, and all parts are closed without a drain."""
    call_log = CallLog()

    async def body() -> None:
        await asyncio.sleep(4)
        raise RuntimeError("broke")

    async def drain() -> None:
        call_log.append("drained")

    running = Running(call_log, "a", nothing, nothing)
    running.body = body
    with pytest.raises(PartFailedError, match="while running") as caught:
        run_virtual(run_parts([running, call_log.part("b")], stop=asyncio.Event(), drain=drain, settings=SETTINGS))
    assert str(caught.value.__cause__) == "broke"
    assert call_log == ["start a", "start b", "ran a", "close b 4", "close a 4"]


def test_drain_and_close_have_limits() -> None:
    """A drain and a close that ignore cancellation only take up to their limits, and do not prevent the close of other parts."""
    call_log = CallLog()

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1, stop.set)
        await run_parts(
            [call_log.part("a"), call_log.part("b", close=stubborn), call_log.part("c", close=failing("c"))],
            stop=stop,
            drain=forever,
            settings=SETTINGS,
        )

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main())
    assert [str(each) for each in caught.value.exceptions] == ["Written failed while closing"] * 2
    # The stop is at 1, the drain lasts until 51, b closes for 10 and is cancelled for 1.
    assert call_log == ["start a", "start b", "start c", "close c 51", "close b 51", "close a 62"]


def test_a_hurry_ends_the_drain_and_shortens_closing() -> None:
    """A second signal takes effect within seconds."""
    call_log = CallLog()

    async def main() -> None:
        stop, hurry = asyncio.Event(), asyncio.Event()
        asyncio.get_running_loop().call_later(1, stop.set)
        asyncio.get_running_loop().call_later(3, hurry.set)
        parts = [call_log.part("a"), call_log.part("b", close=forever)]
        await run_parts(parts, stop=stop, hurry=hurry, drain=forever, settings=SETTINGS)

    with pytest.raises(PartFailedError, match="closing"):
        run_virtual(main())
    assert call_log == ["start a", "start b", "close b 3", "close a 4"]


def test_cancelling_the_runner_closes_the_parts() -> None:
    """If the runner is cancelled, it raises CancelledError after the parts are closed."""
    call_log = CallLog()

    async def main() -> None:
        task = asyncio.create_task(run_parts([call_log.part("a")], stop=asyncio.Event(), settings=SETTINGS))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
    assert call_log == ["start a", "close a 1"]


def test_a_second_cancel_does_not_leave_parts_open() -> None:
    """The first cancel begins the close of the parts. The second one comes while a part closes, and the others are closed nevertheless."""
    call_log = CallLog()

    async def main() -> None:
        parts = [call_log.part("a"), call_log.part("b", close=forever), call_log.part("c", close=forever)]
        task = asyncio.create_task(run_parts(parts, stop=asyncio.Event(), settings=SETTINGS))
        for _ in range(2):
            await asyncio.sleep(1)
            task.cancel()
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
    assert [each[:7] for each in call_log] == ["start a", "start b", "start c", "close c", "close b", "close a"]


def test_signals_stop_and_hurry() -> None:
    """SIGTERM stops the process, a second signal hurries, and then the handlers are removed."""

    async def main() -> tuple[bool, bool]:
        stop, hurry = asyncio.Event(), asyncio.Event()
        with stop_on_signals(stop, hurry):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.wait(), PATIENCE_S)
            was_hurried = hurry.is_set()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(hurry.wait(), PATIENCE_S)
        return was_hurried, hurry.is_set()

    before = signal.getsignal(signal.SIGTERM)
    assert run(main()) == (False, True)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_runs_until_it_gets_a_signal() -> None:
    """The process starts, becomes ready, drains on SIGTERM, and closes."""
    call_log = CallLog()

    async def ready() -> None:
        call_log.append("ready")
        os.kill(os.getpid(), signal.SIGTERM)

    async def drain() -> None:
        call_log.append("drained")

    run(run_until_signalled([call_log.part("a")], on_ready=ready, drain=drain, settings=SETTINGS))
    assert [line.split(" ")[0] for line in call_log] == ["start", "ready", "drained", "close"]


def test_run_uses_uvloop() -> None:
    """`run` uses uvloop, which is installed with kvmesh."""

    async def main() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run(main()).startswith("uvloop")


CHILD = """
import os, sys, time
from kvmesh.lifecycle import die_with_parent
assert die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel call is Linux's")
def test_a_child_dies_with_its_parent() -> None:
    """Killing a parent with SIGKILL leaves no engine process behind."""
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        assert is_running(child_pid)
        parent.kill()
    ends_s = time.monotonic() + PATIENCE_S
    while is_running(child_pid) and time.monotonic() < ends_s:
        time.sleep(0.01)
    if is_running(child_pid):
        os.kill(child_pid, signal.SIGKILL)
        pytest.fail("the child outlived its parent")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel call is Linux's")
def test_a_parent_that_died_earlier_is_detected() -> None:
    """A child whose parent died between the fork and the kernel call ends immediately."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, "1" if os.getpid() != 1 else "2"], capture_output=True, timeout=PATIENCE_S
    )
    assert child.returncode == -signal.SIGKILL
    assert child.stdout == b""


FEW_DESCRIPTORS = """
import asyncio, resource, sys
from kvmesh.lifecycle import run_process
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))

async def main():
    print(resource.getrlimit(resource.RLIMIT_NOFILE))

sys.exit(run_process(main))
"""


def test_a_service_raises_its_limit_of_descriptors() -> None:
    """The soft limit of a login shell is 1024, fewer than a frontend's connections, so clients could use up all descriptors."""
    child = subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS], capture_output=True, timeout=PATIENCE_S, text=True)
    assert child.stdout == "(512, 512)\n", child.stderr
