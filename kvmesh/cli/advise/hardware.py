"""Data sheets of devices, and the size of a model."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
