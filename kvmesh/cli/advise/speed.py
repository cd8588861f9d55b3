"""How fast one worker is: from a measured profile, or from data sheets."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from kvmesh.cli.advise.hardware import DeviceModel, ModelSize
from kvmesh.core import PerformanceProfile

PREFILL_EFFICIENCY = 0.5
"""Part of a device's operations that prompts of a few thousand tokens reach."""
DECODE_EFFICIENCY = 0.6
"""Part of the memory's bandwidth that decode steps reach."""
WEIGHTS_RATIO_MAX = 0.6
"""Largest part of the memory for weights; the rest is for KV and activations."""
KV_RATIO = 0.85
"""Part of the memory that is left for KV once the weights are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpeed:
    """One worker of `ranks` devices. A decode step takes `step_base_s + step_s_per_kv_token * tokens in the batch's KV`."""

    ranks: int
    prefill_s_per_token: float
    step_base_s: float
    step_s_per_request: float
    step_s_per_kv_token: float
    kv_bytes_per_token: float
    kv_tokens: float
    transfer_bytes_per_s: float
    is_measured: bool

    def step_s(self, requests: float, tokens: float) -> float:
        """Seconds of a decode step of `requests` with `tokens` of KV each."""
        return self.step_base_s + requests * (self.step_s_per_request + tokens * self.step_s_per_kv_token)


def estimate_speed(size: ModelSize, device: DeviceModel, weight_bytes: float) -> WorkerSpeed:
    """From data sheets. The number of ranks is the smallest power of two that holds the weights."""
    weights = size.parameters * weight_bytes
    ranks = 2 ** max(0, math.ceil(math.log2(weights / (device.memory_bytes * WEIGHTS_RATIO_MAX))))
    bytes_per_s = ranks * device.memory_bytes_per_s * DECODE_EFFICIENCY
    return WorkerSpeed(
        ranks=ranks,
        prefill_s_per_token=2 * size.parameters / (ranks * device.operations_per_s * PREFILL_EFFICIENCY),
        step_base_s=weights / bytes_per_s,
        step_s_per_request=0.0,
        step_s_per_kv_token=size.kv_bytes_per_token / bytes_per_s,
        kv_bytes_per_token=size.kv_bytes_per_token,
        kv_tokens=(ranks * device.memory_bytes - weights) * KV_RATIO / size.kv_bytes_per_token,
        transfer_bytes_per_s=ranks * device.network_bytes_per_s,
        is_measured=False,
    )


def with_profile(speed: WorkerSpeed, path: str) -> WorkerSpeed:
    """The speed with the measured values of a profile: a JSON object with fields of PerformanceProfile.

    Raises ValueError if the file has other fields or values, OSError if it cannot be read.
    """
    try:
        profile = PerformanceProfile(**json.loads(Path(path).expanduser().read_text()))
    except TypeError as error:
        raise ValueError(f"{path} is not a profile: {error}") from None
    measured = {
        "prefill_s_per_token": profile.prefill_s_per_token,
        "step_base_s": profile.decode_step_base_s,
        "step_s_per_request": profile.decode_s_per_request,
        "step_s_per_kv_token": profile.decode_s_per_kv_token,
        "kv_bytes_per_token": profile.kv_bytes_per_token,
        "transfer_bytes_per_s": profile.transfer_bytes_per_s,
    }
    values = {name: float(value) for name, value in measured.items() if value is not None}
    known = {name: getattr(speed, name) for name in WorkerSpeed.__slots__}
    return WorkerSpeed(**{**known, **values, "is_measured": True})
