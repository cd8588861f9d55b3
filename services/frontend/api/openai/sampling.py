"""Sampling fields that chat and completions share."""

from typing import Any

from kvmesh.checks import LOGIT_BIAS_MAX, LOGPROBS_MAX, STOP_STRINGS_MAX, STOP_TOKENS_MAX
from kvmesh.core import Constraint, SamplingParams
from kvmesh.errors import InvalidRequestError
from services.frontend.api.openai.fields import INTEGER_MAX, Fields, Refusals

TOKENS_MAX = 2**31 - 1
METADATA_MAX = 16
SESSION_CHARACTERS_MAX = 256

# Fields that say who asks; nothing here depends on them.
IGNORED = ("safety_identifier", "prompt_cache_retention")
# Known to OpenAI or vLLM and not served yet; the neutral values ask for nothing.
REFUSED = Refusals(
    ("store", "answers of this endpoint are not kept", (False,)),
    ("service_tier", "there is one", ("auto", "default")),
    ("use_beam_search", "there is no beam search", (False,)),
    ("best_of", "ask for n choices", (1,)),
    ("length_penalty", "there is no beam search", (1, 1.0)),
    ("early_stopping", "there is no beam search", (False,)),
    ("logits_processors", "engines differ", ([],)),
    ("bad_words", "use logit_bias", ([],)),
    ("allowed_token_ids", "use logit_bias", ([],)),
    ("spaces_between_special_tokens", "the tokenizer decides", (True,)),
    ("kv_transfer_params", "the mesh sets them", ()),
    ("vllm_xargs", "engines differ", ()),
)


def read_sampling(
    fields: Fields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    constraint: Constraint | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """All of SamplingParams; ranges are checked later, in one place."""
    fields.refuse_all(REFUSED)
    fields.ignore(IGNORED)
    return SamplingParams(
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        max_tokens=max_tokens,
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        **({} if fields.lacks(_SELDOM) else _read_seldom(fields)),
    )


_SELDOM = frozenset(
    (
        "user metadata top_k min_p presence_penalty frequency_penalty repetition_penalty seed min_tokens stop stop_token_ids "
        "logit_bias skip_special_tokens"
    ).split()
)


def _read_seldom(fields: Fields) -> dict[str, Any]:
    """The fields of `_SELDOM`."""
    _check_who_asks(fields)
    return {
        "top_k": _top_k(fields),
        "min_p": fields.number("min_p"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "seed": fields.integer("seed"),
        "min_tokens": fields.integer("min_tokens", 0, TOKENS_MAX),
        "stop": _stops(fields),
        "stop_token_ids": _token_ids(fields, "stop_token_ids", STOP_TOKENS_MAX),
        "logit_bias": _logit_bias(fields),
        "skip_special_tokens": fields.flag("skip_special_tokens", True),
    }


def _check_who_asks(fields: Fields) -> None:
    """`user` and `metadata` change nothing, but what is not even one of them is a mistake of the client."""
    fields.text("user", 512)
    metadata = fields.object("metadata") or {}
    if len(metadata) > METADATA_MAX or not all(isinstance(each, str) for each in metadata.values()):
        raise fields.wrong("metadata", f"an object of at most {METADATA_MAX} strings")


def _top_k(fields: Fields) -> int | None:
    value = fields.integer("top_k", -1, TOKENS_MAX)
    return 0 if value == -1 else value  # vLLM's older word for off.


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise fields.wrong("stop", "a string or a list of strings")
    if len(stops) > STOP_STRINGS_MAX:
        raise fields.wrong("stop", f"a list of at most {STOP_STRINGS_MAX} strings")
    return tuple(stops)


def _token_ids(fields: Fields, name: str, length_max: int) -> tuple[int, ...]:
    value = fields.take(name)
    if value is None:
        return ()
    if not is_token_list(value):
        raise fields.wrong(name, "a list of token ids")
    if len(value) > length_max:
        raise fields.wrong(name, f"a list of at most {length_max} token ids")
    return tuple(value)


def is_token_list(value: Any) -> bool:
    """A list of integers that could be token ids."""
    return isinstance(value, list) and all(type(each) is int and 0 <= each <= TOKENS_MAX for each in value)


def read_inputs(fields: Fields, name: str) -> list[str | list[int]]:
    """A required field that is a text, token ids, or a list of either, as a list. How many there may be is the caller's to say."""
    value = fields.take(name)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if is_token_list(value):
            return [value]
        if all(isinstance(each, str) for each in value) or all(is_token_list(each) for each in value):
            return value
    raise fields.wrong(name, "a string, a list of strings, a list of token ids, or a list of such lists")


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    value = fields.object("logit_bias")
    if value is None:
        return ()
    if len(value) > LOGIT_BIAS_MAX:
        raise fields.wrong("logit_bias", f"an object of at most {LOGIT_BIAS_MAX} entries")
    pairs: list[tuple[int, float]] = []
    for key, bias in value.items():
        is_id = key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= TOKENS_MAX
        if not is_id or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise fields.wrong("logit_bias", "an object from token ids to numbers")
        pairs.append((int(key), float(bias)))
    return tuple(pairs)


def read_stream_options(fields: Fields, *, is_stream: bool) -> tuple[bool, bool]:
    """Whether usage is wanted at the end of the stream, and whether in every event."""
    value = fields.object("stream_options")
    if value is None:
        return False, False
    if not is_stream:
        raise fields.wrong("stream_options", "absent unless stream is true")
    options = Fields(value, "stream_options.")
    includes_usage = options.flag("include_usage")
    options.ignore(("include_obfuscation",))
    is_continuous = options.flag("continuous_usage_stats")
    options.finish()
    return includes_usage, includes_usage and is_continuous


_TOP_LOGPROBS = frozenset(("logprobs", "top_logprobs"))


def read_top_logprobs(fields: Fields) -> int | None:
    """Chat: `logprobs` says whether, `top_logprobs` how many alternatives."""
    if fields.lacks(_TOP_LOGPROBS):
        return None
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, LOGPROBS_MAX)
    if top is not None and not wanted:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", field="top_logprobs")
    return (top or 0) if wanted else None


def read_prompt_logprobs(fields: Fields, *, is_stream: bool) -> int | None:
    """vLLM's field; its streams leave it out, so a stream that asks for it is refused instead of answered without."""
    value = fields.take("prompt_logprobs")
    if value is None or value is False:
        return None
    count = fields.integer("prompt_logprobs", 0, LOGPROBS_MAX)
    if is_stream:
        raise fields.wrong("prompt_logprobs", "absent when stream is true")
    return count


def read_truncation(fields: Fields) -> int | None:
    """How many of the prompt's last tokens are kept; -1 as many as fit."""
    count = fields.integer("truncate_prompt_tokens", -1, TOKENS_MAX)
    if count == 0:
        raise fields.wrong("truncate_prompt_tokens", "-1 or an integer of at least 1")
    return count


_EXTRAS = frozenset(
    "cache_salt priority session_id prompt_cache_key truncate_prompt_tokens include_stop_str_in_output".split()
)


def read_extras(fields: Fields) -> dict[str, Any]:
    """What only some clients say of a request, as arguments of `Request`."""
    if fields.lacks(_EXTRAS):
        return {}
    return {
        "cache_salt": fields.text("cache_salt", 256) or "",
        "priority": fields.integer("priority", -INTEGER_MAX, INTEGER_MAX) or 0,
        "session_id": read_session(fields),
        "prompt_tokens_kept": read_truncation(fields),
        "includes_stop": fields.flag("include_stop_str_in_output"),
    }


def read_session(fields: Fields) -> str:
    """Which conversation it is, for affinity: `session_id`, else OpenAI's `prompt_cache_key`."""
    session, key = fields.text("session_id", SESSION_CHARACTERS_MAX), fields.text("prompt_cache_key", 256)
    return (key or "") if session is None else session
