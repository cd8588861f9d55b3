"""Translates sampling parameters to TensorRT-LLM's, those that `sampling_names.py` copies excepted.

None takes the model's generation default.

Emitted tokens are part of the engine's prompt, so `max_tokens` and `min_tokens` are reduced by their number. What cannot be continued
correctly after them is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvmesh.core import Constraint, ConstraintKind, Generation
from kvmesh.engines.sampling_names import FIELD, copied_arguments
from kvmesh.errors import UnsupportedError

if TYPE_CHECKING:
    from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

CONSTRAINTS = {
    ConstraintKind.JSON_SCHEMA: "json",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.STRUCTURAL_TAG: "structural_tag",
}
UNSIGNED = 2**64
CONTEXT, GENERATION = "context_only", "generation_only"
"""The engine's names of a handoff's phases (`DisaggregatedParams.request_type`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When the adapter itself ends an answer: after `tokens_max` tokens, or at one of `stop_ids` from number `tokens_min` on.

    The engine stops by the same rules, except that its `min_tokens` holds only the end token back, and that it does not look at the
    first token of a handoff.
    """

    tokens_max: int
    tokens_min: int
    stop_ids: frozenset[int]

    def end(self, token_ids: Sequence[int], done: int) -> tuple[int, int | None] | None:
        """Returns how many of the next tokens belong to the answer, and the stop token (None: the answer continues).

        `done` tokens were emitted before.
        """
        for number, token_id in enumerate(token_ids, done):
            if number >= self.tokens_min and token_id in self.stop_ids:
                return number - done + 1, token_id
            if number + 1 >= self.tokens_max:
                return number - done + 1, None
        return None


def check_emitted(generation: Generation, defaults: Mapping[str, Any]) -> None:
    """Refuses parameters that cannot be continued correctly after tokens that another engine emitted."""
    sampling = generation.sampling
    if not generation.emitted_token_ids:
        return
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if value or (value is None and defaults.get(name)):
            raise UnsupportedError(
                f"TensorRT-LLM would count emitted tokens as prompt, so {name} cannot be continued",
                field=f"{FIELD}.{name}",
            )
    if sampling.seed is not None and temperature(generation, defaults) > 0:
        raise UnsupportedError("a seeded answer cannot be continued elsewhere", field=f"{FIELD}.seed")
    if sampling.constraint is not None:
        raise UnsupportedError("a constrained answer cannot be continued elsewhere", field=f"{FIELD}.constraint")


def temperature(generation: Generation, defaults: Mapping[str, Any]) -> float:
    value = generation.sampling.temperature
    return float(defaults.get("temperature", 1.0) if value is None else value)


def stopping(generation: Generation, *, eos_token_ids: Sequence[int], tokens_left: int) -> Stopping:
    """`tokens_left` is the room in the context after the prompt and the emitted tokens."""
    sampling, emitted = generation.sampling, len(generation.emitted_token_ids)
    limit = tokens_left if sampling.max_tokens is None else min(tokens_left, sampling.max_tokens - emitted)
    ends = () if sampling.ignore_eos else eos_token_ids
    return Stopping(
        tokens_max=limit,
        tokens_min=max(0, (sampling.min_tokens or 0) - emitted),
        stop_ids=frozenset((*ends, *sampling.stop_token_ids)),
    )


def sampling_params(
    generation: Generation,
    rules: Stopping,
    *,
    defaults: Mapping[str, Any],
    end_id: int,
    vocabulary_size: int,
    phase: str = "",
) -> "SamplingParams":
    """Parameters of an attempt in a handoff's `phase`; empty: no handoff.

    A context phase samples the first token, so it has the same parameters, but ends only by its length.
    """
    from tensorrt_llm.sampling_params import SamplingParams

    sampling, is_prefill = generation.sampling, phase == CONTEXT
    arguments = {**defaults, **copied_arguments("trtllm", sampling), **randomness(generation, defaults)}
    # The end token is masked while `min_tokens` are missing, so it must be known then, and cannot end a prefill leg.
    ignores_end = sampling.ignore_eos or (is_prefill and not rules.tokens_min)
    # With `min_tokens` the engine would stop too early at other stop tokens, so `Stopping` alone handles them.
    stop_ids = [] if is_prefill or rules.tokens_min else sorted(rules.stop_ids - {end_id})
    return SamplingParams(
        **arguments,
        logprobs=alternatives(sampling.logprobs),
        # The prompt includes the emitted tokens; a prefill leg returns none.
        prompt_logprobs=None if generation.emitted_token_ids or is_prefill else alternatives(sampling.prompt_logprobs),
        end_id=end_id,
        ignore_eos=ignores_end,
        # A generation phase has room for the handed-over first token and one more, otherwise the engine might not pull the KV.
        max_tokens=1 if is_prefill else max(2 if phase == GENERATION else 1, rules.tokens_max),
        min_tokens=rules.tokens_min or None,
        stop_token_ids=stop_ids or None,
        include_stop_str_in_output=True,
        embedding_bias=embedding_bias(generation, vocabulary_size),
        guided_decoding=None if sampling.constraint is None else guided_decoding(sampling.constraint),
        detokenize=False,
    )


def randomness(generation: Generation, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the sampling's randomness.

    All releases accept top_k 1 for greedy; only newer ones accept a temperature of 0. Without any value the engine is greedy, so all are set.
    """
    sampling, value = generation.sampling, temperature(generation, defaults)
    if value == 0:
        return {"temperature": None, "top_p": None, "top_k": 1, "seed": None}
    return {
        "temperature": value,
        "top_p": sampling.top_p if sampling.top_p is not None else defaults.get("top_p", 1.0),
        "top_k": sampling.top_k if sampling.top_k is not None else defaults.get("top_k", 0),
        # The engine's seeds are unsigned.
        "seed": None if sampling.seed is None else sampling.seed % UNSIGNED,
    }


def alternatives(number: int | None) -> int | None:
    """Releases differ in what 0 means. The alternative beyond the chosen token is cut off later."""
    return None if number is None else max(1, number)


def embedding_bias(generation: Generation, vocabulary_size: int) -> Any:
    """Returns the logit bias as a tensor of the vocabulary's size."""
    if not generation.sampling.logit_bias:
        return None
    import torch

    bias = torch.zeros(vocabulary_size, dtype=torch.float32)
    for token_id, value in generation.sampling.logit_bias:
        bias[token_id] = value
    return bias


def guided_decoding(constraint: Constraint) -> "GuidedDecodingParams":
    from tensorrt_llm.sampling_params import GuidedDecodingParams

    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return GuidedDecodingParams(json_object=True)
    if constraint.kind is ConstraintKind.CHOICE:
        return GuidedDecodingParams(regex="|".join(escaped(option) for option in constraint.options))
    text: dict[str, Any] = {CONSTRAINTS[constraint.kind]: constraint.text}
    return GuidedDecodingParams(**text)


def escaped(text: str) -> str:
    """Returns a regular expression that matches the text only."""
    return "".join(f"\\{each}" if each in r"\.^$*+?{}[]|()" else each for each in text)


def request_priority(priority: int) -> float:
    """Returns the mesh's -100 to 100, larger first, as the engine's 0 to 1, larger first."""
    return (priority + 100) / 200
