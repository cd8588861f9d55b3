"""Translates sampling parameters to SGLang's, those that `sampling_names.py` copies excepted.

None takes the model's generation default.

Emitted tokens are part of SGLang's prompt. So `max_tokens` and `min_tokens` are reduced by their number. A seeded answer continues
correctly, since SGLang draws each token from the seed and its position. Penalties would count only the new output tokens, and a
constraint would start from the beginning, so both are refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from kvmesh.core import Constraint, ConstraintKind, Generation
from kvmesh.engines.sampling_names import FIELD, copied_arguments
from kvmesh.errors import UnsupportedError

NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
ANY_OBJECT = json.dumps({"type": "object"})
REPETITION_PENALTY_MAX = 2.0
PREFILL_ARGUMENTS = {"max_new_tokens": 1}
"""A prefill engine samples the first token. The decode engine gets it with the KV and emits it."""


def sampling_arguments(
    generation: Generation, defaults: Mapping[str, Any], *, context_tokens_max: int, seed: int
) -> dict[str, Any]:
    """Keyword arguments of SGLang's SamplingParams. `seed` is for requests without one."""
    sampling, emitted = generation.sampling, len(generation.emitted_token_ids)
    arguments = {**defaults, **copied_arguments("sglang", sampling)}
    check_emitted(generation, arguments)
    if arguments.get("repetition_penalty", 1.0) > REPETITION_PENALTY_MAX:
        raise UnsupportedError(
            f"SGLang takes a repetition_penalty of at most {REPETITION_PENALTY_MAX:g}",
            field=f"{FIELD}.repetition_penalty",
        )
    top_k = sampling.top_k if sampling.top_k is not None else arguments.get("top_k")
    # SGLang refuses 0, which the mesh uses for "all tokens".
    arguments["top_k"] = top_k or -1
    arguments["sampling_seed"] = seed if sampling.seed is None else sampling.seed
    room = context_tokens_max - len(generation.token_ids)
    arguments["max_new_tokens"] = (sampling.max_tokens or room) - emitted
    arguments["min_new_tokens"] = max(0, (sampling.min_tokens or 0) - emitted)
    if sampling.stop_token_ids:
        arguments["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        arguments["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if sampling.constraint is not None:
        arguments |= constraint_arguments(sampling.constraint)
    return arguments


def check_emitted(generation: Generation, arguments: Mapping[str, Any]) -> None:
    """Refuses parameters that cannot be continued correctly after tokens that another engine emitted."""
    if not generation.emitted_token_ids:
        return
    for name, neutral in NEUTRAL.items():
        if arguments.get(name, neutral) != neutral:
            raise UnsupportedError(
                f"SGLang counts emitted tokens as prompt, which {name} ignores", field=f"{FIELD}.{name}"
            )
    if generation.sampling.constraint is not None:
        raise UnsupportedError("a constrained answer cannot be continued elsewhere", field=f"{FIELD}.constraint")


def constraint_arguments(constraint: Constraint) -> dict[str, str]:
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return {"json_schema": constraint.text}
        case ConstraintKind.JSON_OBJECT:
            return {"json_schema": ANY_OBJECT}
        case ConstraintKind.REGEX:
            return {"regex": constraint.text}
        case ConstraintKind.GRAMMAR:
            return {"ebnf": constraint.text}
        case ConstraintKind.CHOICE:
            # JSON's escapes of strings are those of a grammar's literals.
            return {"ebnf": "root ::= " + " | ".join(json.dumps(option) for option in constraint.options)}
        case ConstraintKind.STRUCTURAL_TAG:
            return {"structural_tag": constraint.text}
