"""When `kvmesh up` restarts a dead child, when it gives up, and when it stops the mesh because the mesh cannot serve."""

import asyncio
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvmesh.cli.children import Child, ChildSpec
from kvmesh.cli.keeper import DELAY_MAX_S, FIRST_DELAY_S, Keeper, RestartHistory, RestartPolicy, with_ports
from kvmesh.discovery.base import DECODE
from kvmesh.errors import UnavailableError
from kvmesh.simulation.registry import MemoryAgent
from tests.conformance.manual_clock import ManualClock
from tests.integration.workers import ToldWorker
from tests.patience import PATIENCE_S


def test_restart_delays_double_up_to_a_limit_and_reset_after_a_long_run() -> None:
    """The keeper gives up after a crash loop. It always restarts a child that ran for longer than the window."""
    history = RestartHistory(RestartPolicy(restarts_max=8, window_s=300))
    delays = [history.on_death(1.0) for _ in range(8)]
    assert delays == [min(FIRST_DELAY_S * 2**number, DELAY_MAX_S) for number in range(8)]
    assert history.on_death(1.0) is None
    history = RestartHistory(RestartPolicy(restarts_max=1, window_s=300))
    assert [history.on_death(300.0) for _ in range(4)] == [FIRST_DELAY_S] * 4
    assert history.on_death(299.0) is None


def test_restarts_can_be_disabled() -> None:
    """With `restarts_max` 0, the keeper gives up at the first death."""
    assert RestartHistory(RestartPolicy(restarts_max=0, window_s=1)).on_death(1e9) is None
    assert RestartHistory(RestartPolicy(restarts_max=10**6, window_s=1)).on_death(0) == FIRST_DELAY_S


def test_a_restarted_frontend_listens_on_the_same_ports() -> None:
    """Restarting a frontend replaces port 0 with the ports of the first process, only in the frontend's part of the flags."""
    flags = ("--http-port", "0", "--rpc-port", "0", "--", "--rpc-port", "0")
    assert with_ports(flags, {"--http-port": 8000, "--rpc-port": 9000}) == (
        *("--http-port", "8000", "--rpc-port", "9000", "--", "--rpc-port", "0"),
    )
    assert with_ports(("--model", "x"), {"--http-port": 8000}) == ("--model", "x")


@dataclass(eq=False)
class FakeProcess:
    """A process that ends when the test sets its status."""

    pid: int
    ended: "asyncio.Future[int]"

    async def wait(self) -> int:
        return await self.ended


@dataclass(eq=False)
class Rig:
    """A keeper of children that are fake processes."""

    folder: Path
    clock: ManualClock = field(default_factory=ManualClock)
    agent: MemoryAgent = field(default_factory=MemoryAgent)
    lines: list[str] = field(default_factory=list)
    processes: list[FakeProcess] = field(default_factory=list)
    refusals: list[Exception] = field(default_factory=list)
    restarts_max: int = 2

    def __post_init__(self) -> None:
        self.keeper = Keeper(
            registry=self.agent.registry(),
            clock=self.clock,
            policy=RestartPolicy(restarts_max=self.restarts_max, window_s=100.0),
            say=self.lines.append,
            restart=self.begin,
        )

    async def begin(self, spec: ChildSpec) -> Child:
        if self.refusals:
            raise self.refusals.pop()
        process = FakeProcess(1000 + len(self.processes), asyncio.get_running_loop().create_future())
        self.processes.append(process)
        return Child(spec, process)

    async def start(self, *services: str) -> None:
        for service in services:
            log = self.folder / f"{service}-0.log"
            spec = ChildSpec(name=f"{service}-0", module=f"services.{service}", argv=(), env={}, log_path=log)
            self.keeper.groups.append([])
            await self.keeper.start(spec, self.keeper.groups[-1], self.begin)

    def kill(self, number: int, status: int = -signal.SIGKILL) -> None:
        self.processes[number].ended.set_result(status)

    async def settle(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0)

    async def wait_lines(self, count: int) -> None:
        await self.settle(lambda: len(self.lines) >= count)

    async def pass_time(self, delay_s: float) -> None:
        """Lets the keeper reach its sleep, then advances the clock."""
        for _ in range(10):
            await asyncio.sleep(0)
        await self.clock.advance(delay_s)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def test_a_dead_child_starts_again_after_its_delay(rig: Rig) -> None:
    """One line names the service, the cause, the delay and the log. The new process replaces the old one in its group."""
    await rig.start("gateway", "decode")
    keeping = asyncio.create_task(rig.keeper.keep_running())
    rig.kill(1)
    await rig.wait_lines(1)
    log = rig.folder / "decode-0.log"
    assert rig.lines == [
        f"decode-0 (pid 1001) was killed by SIGKILL; starting it again in 0.5 s (restart 1 of 2); log: {log}"
    ]
    await rig.pass_time(0.4)
    assert len(rig.processes) == 2
    await rig.pass_time(0.2)
    await rig.wait_lines(2)
    assert rig.lines[1] == "decode-0 started again (pid 1002)"
    assert [[child.pid for child in group] for group in rig.keeper.running()] == [[1000], [1002]]
    keeping.cancel()


async def test_the_last_line_of_the_log_is_the_cause_of_an_exit(rig: Rig) -> None:
    """The keeper quotes the last line of the log of a child that exited with an error status."""
    await rig.start("gateway", "decode")
    (rig.folder / "decode-0.log").write_text("much before\nthe engine died: CUDA error\n\n")
    keeping = asyncio.create_task(rig.keeper.keep_running())
    rig.kill(1, 1)
    await rig.wait_lines(1)
    assert "decode-0 (pid 1001) exited with status 1 (the engine died: CUDA error); starting it again" in rig.lines[0]
    keeping.cancel()


async def test_a_crash_loop_of_a_required_service_ends_the_mesh(rig: Rig) -> None:
    """The mesh ends when a required service reaches the limit. Attempts that failed to start a process count too."""
    await rig.start("gateway", "decode", "planner")
    keeping = asyncio.create_task(rig.keeper.keep_running())
    rig.refusals.append(UnavailableError("the fork server has ended"))
    rig.kill(1)
    for delay_s, count in ((0.5, 2), (1.0, 3)):
        await rig.wait_lines(count - 1)
        await rig.pass_time(delay_s)
        await rig.wait_lines(count)
    assert "decode-0 could not be started: the fork server has ended; starting it again in 1 s" in rig.lines[1]
    await rig.settle(lambda: len(rig.processes) == 4)
    rig.kill(3)
    async with asyncio.timeout(PATIENCE_S):
        assert await keeping == "decode worker"
    assert "giving up after 2 restarts in a row" in rig.lines[-1]


async def test_services_that_are_not_required_may_end(rig: Rig) -> None:
    """Prefill workers and the planner are not required, because decode workers can compute prompts themselves."""
    rig.keeper.policy = RestartPolicy(restarts_max=0, window_s=1)
    await rig.start("gateway", "decode", "planner", "prefill")
    keeping = asyncio.create_task(rig.keeper.keep_running())
    rig.kill(2)
    rig.kill(3)
    await rig.wait_lines(2)
    await rig.pass_time(30)
    assert not keeping.done()
    rig.kill(0)
    await rig.wait_lines(3)
    await rig.pass_time(1.0)
    async with asyncio.timeout(PATIENCE_S):
        assert await keeping == "frontend"


async def test_workers_of_other_machines_keep_the_mesh_running(rig: Rig) -> None:
    """The mesh runs while the registry lists another worker that takes requests. A dead child that is still registered does not count."""
    rig.keeper.policy = RestartPolicy(restarts_max=0, window_s=1)
    await rig.start("gateway", "decode")
    registry = rig.agent.registry()
    await rig.agent.start()
    workers = [ToldWorker(f"decode-{socket.gethostname()}-{pid}", "decode") for pid in (1001, 1)]
    for worker in workers:
        await worker.start(registry)

    async def takes_requests_count() -> int:
        return sum(each.takes_requests for each in (await registry.instances(DECODE)).instances)

    async with asyncio.timeout(PATIENCE_S):
        while await takes_requests_count() < 2:
            await asyncio.sleep(0)
    keeping = asyncio.create_task(rig.keeper.keep_running())
    rig.kill(1)
    await rig.wait_lines(1)
    for _ in range(3):
        await rig.pass_time(1.0)
    assert not keeping.done()
    await registry.deregister(workers[1].description.worker.worker_id)
    assert await takes_requests_count() == 1
    await rig.pass_time(1.0)
    async with asyncio.timeout(PATIENCE_S):
        assert await keeping == "decode worker"
    for worker in workers:
        await worker.die()
    await rig.agent.aclose()


async def test_an_unreachable_registry_does_not_end_the_mesh(rig: Rig) -> None:
    """Without the registry the keeper cannot know whether other workers serve."""
    rig.keeper.policy = RestartPolicy(restarts_max=0, window_s=1)
    await rig.start("gateway", "decode")
    registry = rig.agent.registry()
    registry.set_reachable(False)
    rig.keeper.registry = registry
    keeping = asyncio.create_task(rig.keeper.keep_running())
    rig.kill(1)
    await rig.wait_lines(1)
    for _ in range(3):
        await rig.pass_time(1.0)
    assert not keeping.done()
    registry.set_reachable(True)
    await rig.pass_time(1.0)
    async with asyncio.timeout(PATIENCE_S):
        assert await keeping == "decode worker"
