"""Translates sampling parameters to vLLM's, those that `sampling_names.py` copies excepted. None takes the model's generation default.

The limits apply to the whole answer, even if another engine has emitted a part of it (`continuation.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.core import Constraint, ConstraintKind, Generation
from kvmesh.engines.sampling_names import FIELD, copied_arguments
from kvmesh.errors import UnsupportedError

CONSTRAINTS = {
    ConstraintKind.JSON_SCHEMA: "json",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.STRUCTURAL_TAG: "structural_tag",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuable:
    """Which parts of sampling an engine continues after emitted tokens. All other parts always continue.

    `seeds`: one draw of the generator per token; speculative decoding draws another number. `constraints`: the grammar applies to all of
    the answer, not only after a reasoning part that vLLM's parser finds.
    """

    seeds: bool = True
    constraints: bool = True


ALL_CONTINUED = Continuable()


def decode_arguments(
    generation: Generation, defaults: Mapping[str, Any], continues: Continuable = ALL_CONTINUED
) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams for a decode leg, without the constraint."""
    check_emitted(generation, defaults, continues)
    sampling = generation.sampling
    arguments = {"temperature": 1.0, **defaults, **copied_arguments("vllm", sampling)}
    max_tokens = sampling.max_tokens or arguments.get("max_tokens")
    arguments["max_tokens"] = max_tokens
    arguments["min_tokens"] = sampling.min_tokens or 0
    if generation.emitted_token_ids:
        # The client has them already, and vLLM would include the emitted tokens.
        arguments.pop("prompt_logprobs", None)
    if sampling.stop_token_ids:
        arguments["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        arguments["logit_bias"] = dict(sampling.logit_bias)
    return arguments


def prefill_arguments() -> dict[str, Any]:
    """Returns the arguments of a prefill leg. It samples one token, which is discarded."""
    return {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}


def check_emitted(generation: Generation, defaults: Mapping[str, Any], continues: Continuable) -> None:
    """Refuses parameters that this engine cannot continue correctly after tokens that another engine emitted."""
    if not generation.emitted_token_ids:
        return
    sampling = generation.sampling
    temperature = sampling.temperature if sampling.temperature is not None else defaults.get("temperature", 1.0)
    if sampling.seed is not None and temperature > 0 and not continues.seeds:
        raise UnsupportedError("this engine cannot continue a seeded answer", field=f"{FIELD}.seed")
    if sampling.constraint is not None and not continues.constraints:
        raise UnsupportedError("this engine cannot continue a constrained answer", field=f"{FIELD}.constraint")


def constraint_arguments(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"json_object": True}
    if constraint.kind is ConstraintKind.CHOICE:
        return {"choice": list(constraint.options)}
    return {CONSTRAINTS[constraint.kind]: constraint.text}
