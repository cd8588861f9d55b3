"""The body of POST /v1/completions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta

from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.sampling import Logprobs, OpenAiRequest, Prompts, prompt_list, sampling_params
from services.frontend.api.request_body import TOKENS_MAX, read_body, refused, wrong
from services.frontend.pipeline.request import Request
from services.frontend.settings import PipelineSettings

MAX_TOKENS_DEFAULT = 16
"""OpenAI's, for completions only."""


class CompletionRequest(OpenAiRequest, kw_only=True):
    """The body."""

    prompt: Prompts
    max_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX, description="0 with `echo`: the prompt alone.")] | None = None
    logprobs: Annotated[Logprobs | None, Meta(description="Alternatives per token.")] = None
    echo: Annotated[bool | None, Meta(description="The prompt comes first; with logprobs it is scored too.")] = None
    add_special_tokens: bool | None = None
    suffix: Annotated[Any, refused("there is no filling in the middle", "")] = None


def read_completion(values: Mapping[str, Any], request_id: str, settings: PipelineSettings) -> Asked:
    """The request. InvalidRequestError and UnsupportedError name the field."""
    body = read_body(CompletionRequest, values)
    echoes, is_stream = bool(body.echo), bool(body.stream)
    max_tokens = MAX_TOKENS_DEFAULT if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and (is_stream or not echoes):
        raise wrong("max_tokens", "at least 1 without echo or with stream")
    constraint, constraint_name = body.constraint()
    own = body.scored_prompt()
    template = Request(
        request_id=request_id,
        model=body.model_name(),
        prompt="",
        sampling=sampling_params(
            body,
            # An engine samples one token at least; for the echo alone it is thrown away.
            max_tokens=max(1, max_tokens),
            constraint=constraint,
            prompt_logprobs=_larger(own, body.logprobs if echoes else None),
        ),
        **body.request_options(),
        adds_special_tokens=body.add_special_tokens is not False,
        fields={
            "choices": "n",
            "constraint": constraint_name,
            "prompt_logprobs": "prompt_logprobs" if own is not None else "echo",
        },
    )
    return Asked(
        requests=_one_each(template, _prompts(body, settings)),
        is_stream=is_stream,
        **body.usage_options(),
        has_logprobs=body.logprobs is not None,
        returns_token_ids=bool(body.return_token_ids),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        echoes=echoes,
        has_prompt_logprobs=own is not None,
        is_prompt_only=max_tokens == 0,
    )


def _larger(own: int | None, echoed: int | None) -> int | None:
    return max((count for count in (own, echoed) if count is not None), default=None)


def _one_each(template: Request, prompts: Sequence[str | list[int]]) -> tuple[Request, ...]:
    if len(prompts) == 1:
        return (replace(template, prompt=prompts[0]),)
    return tuple(
        replace(template, prompt=prompt, request_id=f"{template.request_id}.{i}") for i, prompt in enumerate(prompts)
    )


def _prompts(body: CompletionRequest, settings: PipelineSettings) -> list[str | list[int]]:
    prompts = prompt_list(body.prompt, "prompt")
    if len(prompts) > settings.prompts_max:
        raise wrong("prompt", f"a list of at most {settings.prompts_max} prompts")
    return prompts
