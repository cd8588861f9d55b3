"""What an SGLang engine is, for the mesh."""

from collections.abc import Sequence

from kvmesh.core import Capabilities, Handoff, ModelCard, Role
from kvmesh.engines.fingerprint import compatibility_hash
from kvmesh.engines.sglang.messages import Ready
from kvmesh.engines.sglang.settings import SglangSettings

VERSION = "0.5.23"
"""The version that this adapter is written for."""
LOGPROBS_MAX = 20
PREFILL_FEATURES = ("priority", "kv_events", "reset_cache")
GENERATE_FEATURES = ("logprobs", "prompt_logprobs", "logit_bias")
"""The prefill engine of a pair gives the prompt's log-probabilities."""


def model_card(ready: Ready, settings: SglangSettings) -> ModelCard:
    return ModelCard(
        name=settings.served_name or settings.model,
        source=settings.model,
        revision=settings.revision,
        context_tokens_max=ready.context_tokens_max,
        vocabulary_size=ready.vocabulary_size,
        eos_token_ids=tuple(ready.eos_token_ids),
    )


def kv_hash(ready: Ready) -> str:
    """Equal for engines that can exchange KV."""
    return compatibility_hash(ready.compatibility_factors)


def capabilities(
    settings: SglangSettings, *, version: str, has_tokenizer: bool, honors_seeds: bool, is_embedding: bool
) -> Capabilities:
    """With `settings.role` the present role."""
    features = list(PREFILL_FEATURES)
    features += ["lora"] if settings.enable_lora else []
    features += _embedding_features() if is_embedding else _generate_features(has_tokenizer, honors_seeds)
    return Capabilities(
        engine="sglang",
        engine_version=version,
        handoffs=(Handoff.RENDEZVOUS,) if settings.has_kv_transfer else (),
        roles=(Role.PREFILL, Role.DECODE) if settings.can_switch_role else (Role(settings.role),),
        features=tuple(features),
        logprobs_max=LOGPROBS_MAX,
    )


def _embedding_features() -> Sequence[str]:
    return ("embeddings",)


def _generate_features(has_tokenizer: bool, honors_seeds: bool) -> Sequence[str]:
    return (
        *GENERATE_FEATURES,
        *(("seed", "continued_seed") if honors_seeds else ()),
        *(("structured_output",) if has_tokenizer else ()),
    )
