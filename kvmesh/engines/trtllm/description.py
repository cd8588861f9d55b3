"""The description of a started engine: model card, generation defaults, capabilities, compatibility hash."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmesh.core import Capabilities, Handoff, ModelCard, Role
from kvmesh.core.sampling import MODEL_DEFAULTS
from kvmesh.engines.file_hashes import FileHashes
from kvmesh.engines.fingerprint import compatibility_hash, model_files, model_fingerprint
from kvmesh.engines.handles import HandleForm
from kvmesh.engines.ranked import FEATURE
from kvmesh.engines.registration import installed_version
from kvmesh.engines.trtllm.arguments import loads_tokenizer
from kvmesh.engines.trtllm.settings import TrtllmSettings
from kvmesh.errors import InvalidRequestError

WRITTEN_FOR = "1.3.0rc29"
"""The release whose published API the adapter is written for."""
LOGPROBS_MAX = 20
KV_ARGUMENTS = (
    "kv_cache_config.dtype",
    "kv_cache_config.max_attention_window",
    "context_parallel_size",
    "quant_config",
    "speculative_config",
    "sparse_attention_config",
)
"""Engine arguments that change what KV blocks contain."""


def value_at(values: Mapping[str, Any], path: str) -> object:
    """Returns the value at a dotted path; None if there is none."""
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def read_json(settings: TrtllmSettings, name: str) -> dict[str, Any]:
    """Returns a file of the model, from its directory or the hub's local cache; empty if there is none."""
    known = model_files(settings.model, revision=settings.revision)
    folder = known[0].parent if known else Path(settings.model)
    path = folder / name
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def generation_defaults(settings: TrtllmSettings) -> dict[str, Any]:
    values = read_json(settings, "generation_config.json")
    return {name: values[name] for name in MODEL_DEFAULTS if values.get(name) is not None}


def model_card(settings: TrtllmSettings, capacity_tokens: int) -> ModelCard:
    """`capacity_tokens`: what the KV cache holds. A longer context could never be computed."""
    config = read_json(settings, "config.json")
    text: Mapping[str, Any] = config.get("text_config") or config
    context = settings.context_tokens_max or int(text.get("max_position_embeddings") or 0)
    vocabulary = int(text.get("vocab_size") or 0)
    if not context or not vocabulary:
        raise InvalidRequestError(
            f"{settings.model} has no config.json with vocab_size and max_position_embeddings; set context_tokens_max"
            " for the latter",
            field="model",
            reason="invalid_settings",
        )
    return ModelCard(
        name=settings.served_name or settings.model,
        source=settings.model,
        revision=settings.revision,
        context_tokens_max=min(context, capacity_tokens) if capacity_tokens else context,
        vocabulary_size=vocabulary,
        eos_token_ids=eos_token_ids(settings, text),
    )


def eos_token_ids(settings: TrtllmSettings, config: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens from the generation configuration, or else from the model's."""
    value = read_json(settings, "generation_config.json").get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(each) for each in value)


def handle_form(settings: TrtllmSettings, version: str) -> HandleForm:
    """Returns the form of handles.

    The engine states no rule for which layouts of ranks may exchange KV, so they must be equal, as must the version.
    """
    factors = {
        "engine": "trtllm",
        "engine_version": version,
        "backend": settings.transfer_backend,
        "runtime": settings.transceiver_runtime,
        "model": model_fingerprint(settings.model, revision=settings.revision, hashes=FileHashes()),
        "dtype": settings.dtype,
        **{name: value_at(settings.engine_arguments, name) for name in KV_ARGUMENTS},
        "block_size_tokens": settings.block_size_tokens,
        "ranks": (settings.tensor_parallel_size, settings.pipeline_parallel_size, settings.enable_attention_dp),
    }
    return HandleForm(
        format=f"trtllm/{version}/{settings.transfer_backend.lower()}",
        compatibility_hash=compatibility_hash(factors),
        block_size_tokens=settings.block_size_tokens,
    )


def capabilities(settings: TrtllmSettings, *, version: str = "") -> Capabilities:
    """Returns the capability record."""
    features = ["logprobs", "prompt_logprobs", "logit_bias", "seed", "priority"]
    features += ["kv_events"] if settings.kv_events != "off" else []
    features += ["structured_output"] if loads_tokenizer(settings) else []
    features += ["lora"] if settings.enable_lora else []
    features += [FEATURE] if settings.data_parallel_size > 1 else []
    handoff = Handoff.RENDEZVOUS if settings.is_generation_first else Handoff.SEQUENTIAL
    return Capabilities(
        engine="trtllm",
        engine_version=version or installed_version("tensorrt-llm") or WRITTEN_FOR,
        handoffs=(handoff,) if settings.has_kv_transfer else (),
        roles=(Role(settings.role),),
        features=tuple(features),
        logprobs_max=LOGPROBS_MAX,
        data_parallel_size=settings.data_parallel_size,
    )
