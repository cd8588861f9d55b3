"""Runs the attacks in a process with a CPU budget. Another process only uses the same CPU.

Without the budget, the attackers would take the CPU that the mesh needs, and the figures would not show the effect of the attacks.
"""

import asyncio
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from bench.hostile.attacks import Attack, Target, attacks
from bench.hostile.connection import CUT_OFF

SLICE_S = 0.005
EXPECTED = (OSError, TimeoutError, EOFError)
"""The errors of a client whose request is refused or whose connection is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackReport:
    """The number of outcomes of each attack, and the cores that the generator used."""

    ended: Counter[str]
    per_s: dict[str, float]
    cores: float


@dataclass(slots=True)
class CpuBudget:
    """Limits the CPU use of this process. `cores`: CPU-seconds per second that it may use, counted from the first call."""

    cores: float
    began_s: float = field(default_factory=time.monotonic)
    used_s: float = field(default_factory=time.process_time)

    @property
    def cores_used(self) -> float:
        return (time.process_time() - self.used_s) / max(1e-9, time.monotonic() - self.began_s)

    def pause_s(self) -> float:
        """Returns how long the process must sleep until its use is within the budget."""
        due_s = self.began_s + (time.process_time() - self.used_s) / self.cores
        return max(0.0, due_s - time.monotonic())


def prepare_process() -> None:
    """Starts a session for this process, because Linux may divide the CPUs among sessions. The call also completes the imports, which take a
    second."""
    os.setsid()


def attack_process(target: Target, seconds: float, only: str, *, cores: float) -> AttackReport:
    """Runs the attacks whose names contain `only`."""
    chosen = {name: each for name, each in attacks(target).items() if only in name}
    return asyncio.run(_attack(chosen, seconds, CpuBudget(cores)))


def neutral_process(seconds: float, cores: float) -> float:
    """Uses CPU and sends nothing. Returns the cores used."""
    budget = CpuBudget(cores)
    while (now_s := time.monotonic()) < budget.began_s + seconds:
        while time.monotonic() < now_s + SLICE_S:
            pass
        time.sleep(budget.pause_s())
    return budget.cores_used


async def _attack(chosen: dict[str, Attack], seconds: float, budget: CpuBudget) -> AttackReport:
    ended: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    ends_s = time.monotonic() + seconds

    async def repeat(name: str, attack: Attack, number: int) -> None:
        period_s = attack.width / attack.per_s
        await asyncio.sleep(number / attack.per_s)
        while (began_s := time.monotonic()) < ends_s:
            outcome = CUT_OFF
            with suppress(*EXPECTED):
                outcome = await attack.step()
            ended[f"{name}: {outcome}"] += 1
            totals[name] += 1
            await asyncio.sleep(max(0.0, began_s + period_s - time.monotonic()))
            await asyncio.sleep(budget.pause_s())

    tasks = [
        asyncio.create_task(repeat(name, each, number)) for name, each in chosen.items() for number in range(each.width)
    ]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return AttackReport(
        ended=ended, per_s={name: count / seconds for name, count in totals.items()}, cores=budget.cores_used
    )
