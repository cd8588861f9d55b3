"""Fields that requests of several APIs share, and their conversion to the mesh's own values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import Meta

from kvmesh.checks import (
    CACHE_SALT_BYTES_MAX,
    LOGIT_BIAS_MAX,
    PRIORITY_MAX,
    STOP_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKENS_MAX,
)
from kvmesh.core import Constraint, SamplingParams
from kvmesh.core.sampling import LOGPROBS_MAX, RANGES
from services.frontend.api.openai.constraints import (
    SOURCES,
    Document,
    Options,
    Pattern,
    ResponseFormat,
    StructuredOutputs,
    one_constraint,
)
from services.frontend.api.request_body import (
    TOKENS_MAX,
    Body,
    FieldError,
    FieldGroup,
    Ignored,
    Metadata,
    ModelBody,
    TokenId,
    invalid_value,
    refused,
)
from services.frontend.api.run import ApiRequest
from services.frontend.pipeline.request import Prompt, Request


def _within(name: str, help: str = "") -> Meta:  # noqa: A002
    """Describes a range that `kvmesh.checks.check_sampling` enforces."""
    limits = RANGES[name]
    low = "exclusiveMinimum" if limits.above else "minimum"
    return Meta(description=help or None, extra_json_schema={low: limits.low, "maximum": limits.high})


StopString = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": STOP_CHARACTERS_MAX})]
Priority = Annotated[
    int,
    Meta(
        description="Requests with larger values run first.",
        extra_json_schema={"minimum": -PRIORITY_MAX, "maximum": PRIORITY_MAX},
    ),
]
LogitBias = Annotated[
    dict[TokenId, float],
    Meta(max_length=LOGIT_BIAS_MAX, description="By token id; needs workers with the feature `logit_bias`."),
]
Logprobs = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]
Truncation = Annotated[
    int,
    Meta(
        ge=-1,
        le=TOKENS_MAX,
        description="Number of the prompt's last tokens to use; -1: as many as fit.",
        extra_json_schema={"not": {"const": 0}},
    ),
]
Prompts = Annotated[
    str | list[str | TokenId | list[TokenId]], Meta(description="A text, token ids, or a list of either.")
]
SessionId = Annotated[
    str, Meta(max_length=256, description="Requests of one session go to the worker that has its prefix.")
]
SessionKey = Annotated[str, Meta(max_length=256, description="OpenAI's name of session_id.")]
ServiceTier = Annotated[str, Meta(max_length=64, description="Checked; there is one tier.")]
Verbosity = Annotated[Literal["low", "medium", "high"], Meta(description="For chat templates that know it.")]
UserName = Annotated[str, Meta(max_length=512)]


class CommonSampling(ModelBody, kw_only=True):
    """Fields of chat, completions, responses and KServe."""

    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=TOKENS_MAX, description="0 and -1: off.")] | None = None
    min_p: Annotated[float, _within("min_p")] | None = None
    presence_penalty: Annotated[float, _within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _within("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, _within("repetition_penalty")] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=STOP_STRINGS_MAX)] | None = None
    cache_salt: (
        Annotated[
            str,
            Meta(
                max_length=CACHE_SALT_BYTES_MAX, description="Only requests with the same salt share cached prefixes."
            ),
        ]
        | None
    ) = None
    user: Annotated[UserName | None, Meta(description="Checked; changes nothing.")] = None


class SamplingFields(CommonSampling, kw_only=True):
    """Fields of chat, completions and KServe."""

    n: Annotated[int, Meta(ge=1, le=128, description="Choices; the server's limit may be lower.")] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_TOKENS_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Annotated[Any, refused("the prompt's last tokens are kept", "left")] = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(description="Of this, `response_format`, `guided_*`, `regex` and `ebnf`, one may be given."),
    ] = None
    guided_json: Document | None = None
    guided_regex: Pattern | None = None
    guided_choice: Options | None = None
    guided_grammar: Pattern | None = None
    regex: Annotated[Pattern | None, Meta(description="SGLang's name of `guided_regex`.")] = None
    ebnf: Annotated[Pattern | None, Meta(description="SGLang's name of `guided_grammar`.")] = None
    metadata: Annotated[Metadata | None, Meta(description="Checked; changes nothing.")] = None
    safety_identifier: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    guided_decoding_backend: Annotated[Any, refused("the engine chooses")] = None
    guided_whitespace_pattern: Annotated[Any, refused("the engine chooses")] = None
    store: Annotated[bool | None, Meta(description="Checked; answers of this endpoint are not kept.")] = None
    service_tier: ServiceTier | None = None
    use_beam_search: Annotated[Any, refused("there is no beam search", False)] = None
    best_of: Annotated[Any, refused("ask for n choices", 1)] = None
    length_penalty: Annotated[Any, refused("there is no beam search", 1, 1.0)] = None
    early_stopping: Annotated[Any, refused("there is no beam search", False)] = None
    logits_processors: Annotated[Any, refused("engines differ", [])] = None
    bad_words: Annotated[Any, refused("use logit_bias", [])] = None
    allowed_token_ids: Annotated[Any, refused("use logit_bias", [])] = None
    spaces_between_special_tokens: Annotated[Any, refused("the tokenizer decides", True)] = None
    kv_transfer_params: Annotated[Any, refused("the mesh sets them")] = None
    vllm_xargs: Annotated[Any, refused("engines differ")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncate_prompt_tokens == 0:
            raise FieldError("truncate_prompt_tokens", message="must be -1 or an integer of at least 1")

    def constraint(self) -> tuple[Constraint | None, str]:
        """Returns what the answer must match, and the name of the field that requires it."""
        given = _CONSTRAINTS.given(self)
        return one_constraint(given) if given else (None, "response_format")


class StreamOptions(Body, kw_only=True):
    """`stream_options` of chat and completions."""

    include_usage: Annotated[bool | None, Meta(description="The last event has the usage.")] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="With include_usage: every event has the counts of its choice so far.")
    ] = None
    include_obfuscation: Ignored = None


class OpenAiRequest(SamplingFields, kw_only=True):
    """Fields of chat and completions."""

    stream: Annotated[bool | None, Meta(description="Answer with server-sent events, the last of which is [DONE].")] = (
        None
    )
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[Logprobs | bool | None, Meta(description="A number, or false. Whole answers only.")] = (
        None
    )
    return_token_ids: Annotated[bool | None, Meta(description="The answer and the prompt as token ids too.")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Meta(description="Log-probabilities name tokens `token_id:N`.")
    ] = None
    priority: Priority | None = None
    session_id: SessionId | None = None
    prompt_cache_key: SessionKey | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stream and self.stream_options is not None:
            raise invalid_value("stream_options", wanted="absent unless stream is true")
        if self.prompt_logprobs is True:
            raise invalid_value("prompt_logprobs", wanted="an integer")
        if self.prompt_logprobs is False:
            self.prompt_logprobs = None
        if self.stream and self.prompt_logprobs is not None:
            # vLLM leaves them out of streams.
            raise invalid_value("prompt_logprobs", wanted="absent when stream is true")

    def api_request(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        *,
        sampling: SamplingParams,
        fields: Mapping[str, str],
        adds_special_tokens: bool = True,
        **answer: bool,
    ) -> ApiRequest:
        """Builds the request, one per prompt. `answer`: further fields of ApiRequest."""
        first = Request(
            request_id=request_id,
            model=self.model_name(),
            prompt=prompts[0],
            sampling=sampling,
            choices=self.n or 1,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            session_id=(self.prompt_cache_key or "") if self.session_id is None else self.session_id,
            prompt_tokens_kept=self.truncate_prompt_tokens,
            includes_stop=bool(self.include_stop_str_in_output),
            adds_special_tokens=adds_special_tokens,
            fields=fields,
        )
        requests = [first]
        if len(prompts) > 1:
            requests = [replace(first, prompt=each, request_id=f"{request_id}.{i}") for i, each in enumerate(prompts)]
        options = self.stream_options
        includes_usage = options is not None and bool(options.include_usage)
        return ApiRequest(
            requests=requests,
            is_stream=bool(self.stream),
            includes_usage=includes_usage,
            has_usage_throughout=includes_usage and options is not None and bool(options.continuous_usage_stats),
            returns_token_ids=bool(self.return_token_ids),
            names_tokens_by_id=bool(self.return_tokens_as_token_ids),
            has_prompt_logprobs=self.prompt_logprobs is not None,
            **answer,
        )


def sampling_params(body: ModelBody, **values: Any) -> SamplingParams:
    """Converts the fields of `body` that SamplingParams has too; `values` override them. Ranges are checked later."""
    for name, value in _shared_fields(type(body)).given(body):
        if name not in values:
            convert = _CONVERTED.get(name)
            values[name] = value if convert is None else convert(value)
    return SamplingParams(**values)


@cache
def _shared_fields(kind: type[ModelBody]) -> FieldGroup:
    return FieldGroup([each.name for each in fields(SamplingParams) if each.name in kind.__struct_fields__])


_CONSTRAINTS = FieldGroup(list(SOURCES))
_CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "top_k": lambda value: max(value, 0),  # -1 is vLLM's older value for off.
    "stop": lambda value: (value,) if isinstance(value, str) else tuple(value),
    "stop_token_ids": tuple,
    "logit_bias": lambda value: tuple(value.items()),
}


def prompt_list(value: str | list[Any], name: str) -> list[str | list[int]]:
    """Returns a text, token ids, or a list of either, as a list. The caller checks its length."""
    if isinstance(value, str):
        return [value]
    kinds = {type(each) for each in value}
    if kinds == {int}:
        return [value]
    if len(kinds) != 1:
        raise invalid_value(name, wanted="a string, a list of strings, a list of token ids, or a list of such lists")
    return value
