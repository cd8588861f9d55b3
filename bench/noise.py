"""Measures how noisy the machine was. Figures from a shared machine mean nothing without this."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

CALIBRATION_ROUNDS = 3
CALIBRATION_STEPS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """`calibration_ms`: time of a fixed loop, the worse of before and after. `others_cores`: cores used by other processes."""

    calibration_ms: float
    others_cores: float


def calibration_ms() -> float:
    """Returns the milliseconds of a fixed single-core loop. It shows CPU time that the host takes, which /proc/stat does not."""
    best_s = float("inf")
    for _ in range(CALIBRATION_ROUNDS):
        start_s = time.perf_counter()
        total = 0
        for i in range(CALIBRATION_STEPS):
            total += i * i & 7
        best_s = min(best_s, time.perf_counter() - start_s)
    return 1000 * best_s


def busy_core_s() -> float:
    """Returns the CPU-seconds of the whole machine since it started."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def cpu_pressure_s() -> float:
    """Returns the seconds since boot in which some process waited for a CPU; 0 if the kernel does not count them."""
    try:
        words = Path("/proc/pressure/cpu").read_text().splitlines()[0].split()
    except OSError:
        return 0.0
    return int(words[-1].removeprefix("total=")) / 1e6
