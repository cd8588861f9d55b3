"""How tokens are chosen and when generation ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


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
class SamplingParams:
    """Sampling of one request. None takes the model's generation default, else the neutral value.

    Ranges are those of `protos/kvmesh/types/v1/sampling.proto`; `kvmesh.checks.check_sampling` enforces them where
    foreign data enters.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Sequence[tuple[int, float]] = ()
    constraint: Constraint | None = None
    skip_special_tokens: bool = True
