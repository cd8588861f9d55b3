"""How tokens are chosen and when generation ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

LOGPROBS_MAX = 20


class ConstraintKind(StrEnum):
    """What kind of document a constraint's text is."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Structured output. `text` is the document; for CHOICE it is empty and `options` holds the answers."""

    kind: ConstraintKind
    text: str = ""
    options: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """From `low` to `high`, both allowed; `above` excludes `low`."""

    low: float
    high: float
    above: bool = False


def _number(low: float, high: float, *, above: bool = False, has_model_default: bool = False) -> Any:
    """`has_model_default`: a model's generation_config.json may set it."""
    limits = Range(low=low, high=high, above=above)
    return field(default=None, metadata={"range": limits, "has_model_default": has_model_default})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. None takes the model's generation default, else the neutral value.

    `kvmesh.checks.check_sampling` enforces the ranges where foreign data enters. A number that is declared here is written to
    and read from the field of the same name in `protos/kvmesh/types/v1/sampling.proto`, and taken from HTTP bodies whose
    class (`services/frontend/api/openai/sampling.py`) has a field of that name. `kvmesh/engines/sampling_names.py` says what
    each engine calls it.
    """

    temperature: float | None = _number(low=0, high=2, has_model_default=True)
    top_p: float | None = _number(low=0, high=1, above=True, has_model_default=True)
    top_k: int | None = _number(low=0, high=2**31 - 1, has_model_default=True)
    min_p: float | None = _number(low=0, high=1, has_model_default=True)
    presence_penalty: float | None = _number(low=-2, high=2)
    frequency_penalty: float | None = _number(low=-2, high=2)
    repetition_penalty: float | None = _number(low=0, high=10, above=True, has_model_default=True)
    seed: int | None = _number(low=-(2**63), high=2**63 - 1)
    max_tokens: int | None = _number(low=1, high=2**31 - 1)
    min_tokens: int | None = _number(low=0, high=2**31 - 1)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = _number(low=0, high=LOGPROBS_MAX)
    prompt_logprobs: int | None = _number(low=0, high=LOGPROBS_MAX)
    logit_bias: Sequence[tuple[int, float]] = ()
    constraint: Constraint | None = None
    skip_special_tokens: bool = True


RANGES: Mapping[str, Range] = {
    each.name: each.metadata["range"] for each in fields(SamplingParams) if "range" in each.metadata
}
"""Of the numbers in SamplingParams, by name."""
MODEL_DEFAULTS = tuple(each.name for each in fields(SamplingParams) if each.metadata.get("has_model_default"))
"""Parameters whose defaults a model's generation_config.json may set."""
