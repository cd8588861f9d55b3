"""The body of POST /v1/completions."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from services.frontend.api.openai.sampling import Logprobs, OpenAiRequest, Prompts, prompt_list, sampling_params
from services.frontend.api.request_body import TOKENS_MAX, invalid_value, read_body, refused
from services.frontend.api.run import ApiRequest
from services.frontend.settings import PipelineSettings

MAX_TOKENS_DEFAULT = 16
"""OpenAI's default, for completions only."""


class CompletionRequest(OpenAiRequest, kw_only=True):
    """The body."""

    prompt: Prompts
    max_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX, description="0 with `echo`: the prompt alone.")] | None = None
    logprobs: Annotated[Logprobs | None, Meta(description="Alternatives per token.")] = None
    echo: Annotated[bool | None, Meta(description="The prompt comes first; with logprobs it is scored too.")] = None
    add_special_tokens: bool | None = None
    suffix: Annotated[Any, refused("there is no filling in the middle", "")] = None


def read_completion(values: Mapping[str, Any], request_id: str, settings: PipelineSettings) -> ApiRequest:
    """Reads a body. InvalidRequestError and UnsupportedError name the field."""
    body = read_body(CompletionRequest, values)
    echoes, is_stream = bool(body.echo), bool(body.stream)
    max_tokens = MAX_TOKENS_DEFAULT if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and (is_stream or not echoes):
        raise invalid_value("max_tokens", wanted="at least 1 without echo or with stream")
    constraint, constraint_name = body.constraint()
    prompts = prompt_list(body.prompt, "prompt")
    if len(prompts) > settings.prompts_max:
        raise invalid_value("prompt", wanted=f"a list of at most {settings.prompts_max} prompts")
    scored = [count for count in (body.prompt_logprobs, body.logprobs if echoes else None) if count is not None]
    return body.api_request(
        request_id,
        prompts,
        sampling=sampling_params(
            body,
            # An engine samples at least one token; if the client wants only the echo, the token is dropped.
            max_tokens=max(1, max_tokens),
            constraint=constraint,
            prompt_logprobs=max(scored, default=None),
        ),
        adds_special_tokens=body.add_special_tokens is not False,
        fields={
            "choices": "n",
            "constraint": constraint_name,
            "prompt_logprobs": "prompt_logprobs" if body.prompt_logprobs is not None else "echo",
        },
        has_logprobs=body.logprobs is not None,
        echoes=echoes,
        is_prompt_only=max_tokens == 0,
    )
