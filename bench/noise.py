"""How noisy the machine was: a figure without this beside it says nothing on a shared machine."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

CALIBRATION_ROUNDS = 3
CALIBRATION_STEPS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """`calibration_ms`: a fixed loop before and after, the worse of the two. `others_cores`: what nobody measured used."""

    calibration_ms: float
    others_cores: float


def calibration_ms() -> float:
    """Milliseconds for a fixed piece of single-core work: a host that takes time away shows here, not in /proc/stat."""
    best_s = float("inf")
    for _ in range(CALIBRATION_ROUNDS):
        start_s = time.perf_counter()
        total = 0
        for i in range(CALIBRATION_STEPS):
            total += i * i & 7
        best_s = min(best_s, time.perf_counter() - start_s)
    return 1000 * best_s


def busy_core_s() -> float:
    """CPU-seconds that the whole machine has spent since it started."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")
