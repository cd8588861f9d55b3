"""Checks of values from outside. `check_...` raise InvalidRequestError that names the field."""

from array import array
from collections.abc import Sequence
from operator import attrgetter

from kvmesh.constraint_costs import check_constraint
from kvmesh.core import Generation, SamplingParams
from kvmesh.core.sampling import RANGES
from kvmesh.errors import InvalidRequestError

STOP_STRINGS_MAX = 16
STOP_CHARACTERS_MAX = 256
STOP_TOKENS_MAX = 64
LOGIT_BIAS_MAX = 1024
PRIORITY_MAX = 100
CACHE_SALT_BYTES_MAX = 256
REQUEST_ID_CHARACTERS_MAX = 128
MEDIA_MAX = 64
ADAPTER_BYTES_MAX = 1024
TRACEPARENT_BYTES_MAX = 256
# Most requests set few of the numbers, so reading them takes most of the time of the check.
_IN_RANGES = attrgetter(*RANGES)


def check_range(value: float | None, field: str, *, low: float, high: float, above: bool = False) -> None:
    """Accepts `low` to `high`, without `low` if `above`, and None. Refuses NaN and infinities."""
    # Uses comparisons only: an integer from JSON may be larger than any float.
    if value is None or (low <= value <= high and not (above and value == low)):
        return
    bound = f"above {low:g}" if above else f"at least {low:g}"
    shown = f", not {value:g}" if abs(value) < 1e15 else ""
    raise InvalidRequestError(f"{field} must be {bound} and at most {high:g}{shown}", field=field)


def check_text(text: str, field: str, bytes_max: int) -> None:
    """Accepts at most `bytes_max` bytes of UTF-8. Refuses lone surrogates, which JSON can express and UTF-8 cannot."""
    try:
        check_length(len(text.encode()), field, high=bytes_max, unit="bytes")
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{field} must be valid Unicode", field=field) from None


def check_length(length: int, field: str, *, low: int = 0, high: int, unit: str = "entries") -> None:
    if not low <= length <= high:
        raise InvalidRequestError(f"{field} must have {low} to {high} {unit}, not {length}", field=field)


def check_sampling(params: SamplingParams, *, prefix: str = "sampling.") -> None:
    """Checks all ranges and lengths of SamplingParams. `prefix` precedes the names of fields in errors."""
    for (name, limits), value in zip(RANGES.items(), _IN_RANGES(params), strict=True):
        if value is not None:
            check_range(value, prefix + name, low=limits.low, high=limits.high, above=limits.above)
    if params.max_tokens is not None:
        check_range(params.min_tokens, f"{prefix}min_tokens", low=0, high=params.max_tokens)
    check_length(len(params.stop), f"{prefix}stop", high=STOP_STRINGS_MAX)
    for stop in params.stop:
        check_length(len(stop), f"{prefix}stop", low=1, high=STOP_CHARACTERS_MAX, unit="characters")
    check_length(len(params.stop_token_ids), f"{prefix}stop_token_ids", high=STOP_TOKENS_MAX)
    check_length(len(params.logit_bias), f"{prefix}logit_bias", high=LOGIT_BIAS_MAX)
    for _, bias in params.logit_bias:
        check_range(bias, f"{prefix}logit_bias", low=-100, high=100)
    if params.constraint is not None:
        check_constraint(params.constraint, f"{prefix}constraint")


def check_generation(generation: Generation, *, vocabulary_size: int, context_tokens_max: int) -> None:
    """Checks a generation for a model: token ids, prompt length, sampling, and that a token is left to generate."""
    check_sampling(generation.sampling, prefix="generation.sampling.")
    check_range(generation.priority, "generation.priority", low=-PRIORITY_MAX, high=PRIORITY_MAX)
    check_text(generation.cache_salt, field="generation.cache_salt", bytes_max=CACHE_SALT_BYTES_MAX)
    check_text(generation.adapter, field="generation.adapter", bytes_max=ADAPTER_BYTES_MAX)
    check_length(len(generation.media), "generation.media", high=MEDIA_MAX)
    check_tokens(generation.token_ids, "generation.token_ids", vocabulary_size)
    # An id beyond the vocabulary would be an index out of range inside the engine, which kills it.
    check_ids(generation.emitted_token_ids, "generation.emitted_token_ids", vocabulary_size)
    check_ids(generation.sampling.stop_token_ids, "generation.sampling.stop_token_ids", vocabulary_size)
    biased = [token_id for token_id, _ in generation.sampling.logit_bias]
    check_ids(biased, "generation.sampling.logit_bias", vocabulary_size)
    length = len(generation.token_ids) + len(generation.emitted_token_ids)
    if length >= context_tokens_max:
        raise InvalidRequestError(
            f"the prompt has {length} tokens; the model accepts at most {context_tokens_max - 1}, because it must generate at least one",
            field="generation.token_ids",
            reason="context_length_exceeded",
        )
    max_tokens = generation.sampling.max_tokens
    if max_tokens is not None and len(generation.emitted_token_ids) >= max_tokens:
        raise InvalidRequestError(
            "all max_tokens tokens have already been emitted", field="generation.emitted_token_ids"
        )


def check_tokens(token_ids: Sequence[int], field: str, vocabulary_size: int) -> None:
    """Requires at least one id. Each must be within the vocabulary."""
    if not token_ids:
        raise InvalidRequestError(f"{field} must not be empty", field=field)
    check_ids(token_ids, field, vocabulary_size)


def check_ids(token_ids: Sequence[int], field: str, vocabulary_size: int) -> None:
    if token_ids and not _are_below(token_ids, vocabulary_size):
        raise InvalidRequestError(f"{field} must hold ids below {vocabulary_size}", field=field)


def _are_below(token_ids: Sequence[int], limit: int) -> bool:
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        # Imported here, since only workers, which keep long prompts as arrays, need numpy.
        import numpy as np

        return int(np.maximum.reduce(np.frombuffer(token_ids, np.uint32))) < limit
    return max(token_ids) < limit and min(token_ids) >= 0


def is_whole_number(text: str) -> bool:
    """Returns whether a text has ASCII digits only, and at least one. `str.isdigit` also accepts "²", on which `int` fails."""
    return text.isascii() and text.isdigit()
