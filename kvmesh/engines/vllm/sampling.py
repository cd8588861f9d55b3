"""Translates sampling parameters to vLLM's. None takes the model's generation default.

Emitted tokens are part of vLLM's prompt. So `max_tokens` and `min_tokens` are reduced by their number. The repetition penalty needs no
change, since it counts prompt and output alike. Presence and frequency penalties, a seed and a constraint would start anew, so they
are refused.
"""

from collections.abc import Mapping
from typing import Any

from kvmesh.core import Constraint, ConstraintKind, Generation
from kvmesh.errors import InvalidRequestError, UnsupportedError

FIELD = "generation.sampling"
SIMPLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
)
CONSTRAINTS = {
    ConstraintKind.JSON_SCHEMA: "json",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.STRUCTURAL_TAG: "structural_tag",
}


def decode_arguments(generation: Generation, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams for a decode leg, without the constraint."""
    check_emitted(generation, defaults)
    sampling = generation.sampling
    emitted = len(generation.emitted_token_ids)
    arguments = {"temperature": 1.0, **defaults}
    arguments |= {name: value for name in SIMPLE if (value := getattr(sampling, name)) is not None}
    max_tokens = sampling.max_tokens or arguments.get("max_tokens")
    arguments["max_tokens"] = None if max_tokens is None else max_tokens - emitted
    arguments["min_tokens"] = max(0, (sampling.min_tokens or 0) - emitted)
    arguments["ignore_eos"] = sampling.ignore_eos
    if emitted:
        # The client has them already, and vLLM would include the emitted tokens.
        arguments.pop("prompt_logprobs", None)
    if sampling.stop_token_ids:
        arguments["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        arguments["logit_bias"] = dict(sampling.logit_bias)
    return arguments


def prefill_arguments() -> dict[str, Any]:
    """A prefill leg samples one token, which is discarded."""
    return {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}


def check_emitted(generation: Generation, defaults: Mapping[str, Any]) -> None:
    """Refuses parameters that cannot be continued correctly after tokens that another engine emitted."""
    emitted = len(generation.emitted_token_ids)
    if not emitted:
        return
    sampling = generation.sampling
    if sampling.max_tokens is not None and emitted >= sampling.max_tokens:
        raise InvalidRequestError("all max_tokens were emitted already", field="generation.emitted_token_ids")
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(sampling, name) or (getattr(sampling, name) is None and defaults.get(name)):
            raise UnsupportedError(
                f"vLLM counts emitted tokens as prompt, which {name} ignores", field=f"{FIELD}.{name}"
            )
    temperature = sampling.temperature if sampling.temperature is not None else defaults.get("temperature", 1.0)
    if sampling.seed is not None and temperature > 0:
        raise UnsupportedError("a seeded answer cannot be continued elsewhere", field=f"{FIELD}.seed")
    if sampling.constraint is not None:
        raise UnsupportedError("a constrained answer cannot be continued elsewhere", field=f"{FIELD}.constraint")


def constraint_arguments(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"json_object": True}
    if constraint.kind is ConstraintKind.CHOICE:
        return {"choice": list(constraint.options)}
    return {CONSTRAINTS[constraint.kind]: constraint.text}
