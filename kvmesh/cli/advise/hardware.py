"""Data sheets of devices, the size of a model, and how fast one worker is: by data sheets, or by a measured profile."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
class DeviceModel:
    """A device's memory, dense bfloat16 operations per second, and bytes per second to its memory and to a device elsewhere."""

    title: str
    memory_bytes: float
    operations_per_s: float
    memory_bytes_per_s: float
    network_bytes_per_s: float
    is_gpu: bool = True


DEVICES = {
    # NVIDIA's data sheets, SXM versions where there are several, without sparsity; a network of 400 Gb/s a device.
    "a100": DeviceModel(
        title="A100 80 GB",
        memory_bytes=80e9,
        operations_per_s=312e12,
        memory_bytes_per_s=2.0e12,
        network_bytes_per_s=25e9,
    ),
    "l40s": DeviceModel(
        title="L40S", memory_bytes=48e9, operations_per_s=362e12, memory_bytes_per_s=0.86e12, network_bytes_per_s=12e9
    ),
    "h100": DeviceModel(
        title="H100", memory_bytes=80e9, operations_per_s=989e12, memory_bytes_per_s=3.35e12, network_bytes_per_s=50e9
    ),
    "h200": DeviceModel(
        title="H200", memory_bytes=141e9, operations_per_s=989e12, memory_bytes_per_s=4.8e12, network_bytes_per_s=50e9
    ),
    "b200": DeviceModel(
        title="B200", memory_bytes=180e9, operations_per_s=2250e12, memory_bytes_per_s=7.7e12, network_bytes_per_s=50e9
    ),
    # A server processor: for trials and small models.
    "cpu": DeviceModel(
        title="CPU",
        memory_bytes=32e9,
        operations_per_s=1e12,
        memory_bytes_per_s=50e9,
        network_bytes_per_s=1e9,
        is_gpu=False,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters, and bytes of KV per token. `is_estimated`: the KV was estimated from the parameters."""

    parameters: float
    kv_bytes_per_token: float
    is_estimated: bool


KV_BYTES_8B = 131_072
"""KV of a token in an 8B model with grouped queries: 32 layers, 8 heads of 128, keys and values, 2 bytes."""


def model_size(model: str, parameters_billions: float) -> ModelSize:
    """From the model's config.json if it is a directory, else from the given size or the size in its name, such as 8B.

    Raises ValueError if the size is not known.
    """
    config = Path(model).expanduser() / "config.json"
    if config.is_file():
        return _from_config(json.loads(config.read_text()), parameters_billions)
    billions = parameters_billions or _billions_in(model)
    if not billions:
        raise ValueError(f"the size of {model} is unknown: give --parameters-billions")
    return ModelSize(
        parameters=billions * 1e9, kv_bytes_per_token=KV_BYTES_8B * (billions / 8) ** 0.5, is_estimated=True
    )


def _from_config(config: dict[str, Any], parameters_billions: float) -> ModelSize:
    layers, width, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    kv_heads, head = config.get("num_key_value_heads", heads), config.get("head_dim") or width // heads
    feed_forward, vocabulary = config.get("intermediate_size", 4 * width), config.get("vocab_size", 0)
    per_layer = 2 * width * head * (heads + kv_heads) + 3 * width * feed_forward
    embeddings = vocabulary * width * (1 if config.get("tie_word_embeddings") else 2)
    return ModelSize(
        parameters=parameters_billions * 1e9 or float(layers * per_layer + embeddings),
        kv_bytes_per_token=float(2 * 2 * layers * kv_heads * head),
        is_estimated=False,
    )


def _billions_in(name: str) -> float:
    found = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)[bB](?![a-zA-Z])", name)
    return float(found.group(1)) if found else 0.0


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
        """Returns the seconds of a decode step of `requests` with `tokens` of KV each."""
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
    """Returns the speed with the measured values of a profile: a JSON object with fields of PerformanceProfile.

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
