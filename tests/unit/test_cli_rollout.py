"""Tests of `kvmesh rollout --rollback-command` with a supervisor that starts workers of a working or a broken version."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.cli.rollout import RollbackError, Rollout, RolloutSettings
from kvmesh.core import WorkerRef
from kvmesh.discovery.base import DECODE, PREFILL, Health, Instance
from kvmesh.errors import UnavailableError


@dataclass
class Supervisor:
    """Replaces each worker that ends. A worker of a broken version registers but no router uses it, or it does not register at all.

    `rolled_back` exists once the former version is installed.
    """

    rolled_back: Path
    broken_from: int
    """Number of the first worker of the broken version. Workers 0 to 3 run before the rollout."""
    registers: bool = True
    running: dict[str, tuple[str, bool]] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    started: int = 0

    def start(self, service: str) -> None:
        is_broken = self.started >= self.broken_from and not self.rolled_back.exists()
        if is_broken and not self.registers:
            self.waiting.append(service)
            return
        self.running[f"{service}-{self.started}"] = (service, not is_broken)
        self.started += 1

    async def instances(self, service: str) -> Any:
        if self.rolled_back.exists():
            waiting, self.waiting = self.waiting, []
            for each in waiting:
                self.start(each)
        names = [name for name, (of, _) in self.running.items() if of == service]
        return SimpleNamespace(
            instances=[
                Instance(
                    service=service,
                    instance_id=name,
                    host=name,
                    port=1,
                    meta={"epoch": name},
                    tags=(),
                    health=Health.PASSING,
                    is_draining=False,
                )
                for name in names
            ]
        )

    async def list_workers(self) -> Any:
        return [
            SimpleNamespace(
                worker=WorkerRef(worker_id=name, address=f"{name}:1", epoch=1),
                excluded_by="" if is_used else "breaker_open",
                breaker="",
            )
            for name, (_, is_used) in self.running.items()
        ]

    async def drain(self, address: str, *, exits: bool, drain_timeout_s: float, timeout_s: float) -> int:
        assert exits and drain_timeout_s < timeout_s
        service, _ = self.running.pop(address.partition(":")[0])
        self.start(service)
        return 0


def rollout_of(supervisor: Supervisor, **settings: Any) -> Rollout:
    for service in (PREFILL, PREFILL, DECODE, DECODE):
        supervisor.start(service)
    connection: Any = SimpleNamespace(registry=supervisor, list_workers=supervisor.list_workers, channels=None)
    return Rollout(connection, RolloutSettings(observe_s=0.0, ready_timeout_s=1.0, **settings), workers=supervisor)


def services(supervisor: Supervisor) -> list[str]:
    return sorted(service for service, _ in supervisor.running.values())


async def test_a_rollout_without_a_problem_runs_no_command(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "rolled-back", broken_from=99)
    assert await rollout_of(supervisor, rollback_command=f"touch {supervisor.rolled_back}").run() == 4
    assert not supervisor.rolled_back.exists()


@pytest.mark.parametrize("registers", [True, False])
@pytest.mark.parametrize("broken_from", [4, 5, 7])
async def test_a_rollout_that_stops_is_rolled_back(tmp_path: Path, broken_from: int, registers: bool) -> None:
    """Every restarted worker, including the failed one, is restarted with the former version."""
    supervisor = Supervisor(tmp_path / "rolled-back", broken_from=broken_from, registers=registers)
    rollout = rollout_of(supervisor, rollback_command=f"touch {supervisor.rolled_back}")
    with pytest.raises(UnavailableError, match="no worker replaced") as stopped:
        await rollout.run()
    assert not isinstance(stopped.value, RollbackError)
    assert services(supervisor) == [DECODE, DECODE, PREFILL, PREFILL]
    assert all(is_used for _, is_used in supervisor.running.values())
    new_version = {f"{service}-{number}" for service in (PREFILL, DECODE) for number in range(4, broken_from)}
    assert not new_version & set(supervisor.running)


@pytest.mark.parametrize(("command", "problem"), [("exit 3", "ended with status 3"), ("true", "no worker replaced")])
async def test_a_failed_rollback_is_reported(tmp_path: Path, command: str, problem: str) -> None:
    supervisor = Supervisor(tmp_path / "rolled-back", broken_from=5)
    with pytest.raises(RollbackError, match=problem):
        await rollout_of(supervisor, rollback_command=command).run()


async def test_without_a_rollback_command_the_other_workers_keep_their_versions(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "rolled-back", broken_from=5)
    with pytest.raises(UnavailableError):
        await rollout_of(supervisor).run()
    assert sorted(supervisor.running) == [f"{DECODE}-2", f"{DECODE}-3", f"{PREFILL}-4", f"{PREFILL}-5"]
