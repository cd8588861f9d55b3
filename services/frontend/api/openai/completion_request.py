"""The body of POST /v1/completions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvmesh.checks import LOGPROBS_MAX
from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.constraints import read_constraint
from services.frontend.api.openai.fields import Fields
from services.frontend.api.openai.sampling import (
    TOKENS_MAX,
    read_extras,
    read_inputs,
    read_prompt_logprobs,
    read_sampling,
    read_stream_options,
)
from services.frontend.pipeline.request import Request
from services.frontend.settings import PipelineSettings

MAX_TOKENS_DEFAULT = 16
"""OpenAI's, for completions only."""


def read_completion(values: Mapping[str, Any], request_id: str, settings: PipelineSettings) -> Asked:
    """The request. InvalidRequestError and UnsupportedError name the field."""
    fields = Fields(values)
    model = fields.text("model", 256)
    if not model:
        raise fields.wrong("model", "a model's name")
    is_stream = fields.flag("stream")
    logprobs = fields.integer("logprobs", 0, LOGPROBS_MAX)
    echoes = fields.flag("echo")
    max_tokens = fields.integer("max_tokens", 0 if echoes and not is_stream else 1, TOKENS_MAX)
    choices = fields.integer("n", 1, 128) or 1
    prompts = read_prompts(fields, settings)
    constraint, constraint_name = read_constraint(fields)
    own = read_prompt_logprobs(fields, is_stream=is_stream)
    includes_usage, has_usage_throughout = read_stream_options(fields, is_stream=is_stream)
    template = Request(
        request_id=request_id,
        model=model,
        prompt="",
        sampling=read_sampling(
            fields,
            # An engine samples one token at least; for the echo alone it is thrown away.
            max_tokens=MAX_TOKENS_DEFAULT if max_tokens is None else max(1, max_tokens),
            logprobs=logprobs,
            constraint=constraint,
            prompt_logprobs=_prompt_logprobs(own, logprobs if echoes else None),
        ),
        choices=choices,
        **read_extras(fields),
        adds_special_tokens=fields.flag("add_special_tokens", True),
        fields={
            "choices": "n",
            "constraint": constraint_name,
            "prompt_logprobs": "prompt_logprobs" if own is not None else "echo",
        },
    )
    asked = Asked(
        requests=_one_each(template, prompts),
        is_stream=is_stream,
        includes_usage=includes_usage,
        has_usage_throughout=has_usage_throughout,
        has_logprobs=logprobs is not None,
        returns_token_ids=fields.flag("return_token_ids"),
        names_tokens_by_id=fields.flag("return_tokens_as_token_ids"),
        echoes=echoes,
        has_prompt_logprobs=own is not None,
        is_prompt_only=max_tokens == 0,
    )
    fields.refuse("suffix", "there is no filling in the middle", ("",))
    fields.finish()
    return asked


def _prompt_logprobs(own: int | None, echoed: int | None) -> int | None:
    return max((count for count in (own, echoed) if count is not None), default=None)


def _one_each(template: Request, prompts: Sequence[str | list[int]]) -> tuple[Request, ...]:
    if len(prompts) == 1:
        return (replace(template, prompt=prompts[0]),)
    return tuple(
        replace(template, prompt=prompt, request_id=f"{template.request_id}.{i}") for i, prompt in enumerate(prompts)
    )


def read_prompts(fields: Fields, settings: PipelineSettings) -> list[str | list[int]]:
    """`prompt` in its four shapes, and not too many of them."""
    prompts = read_inputs(fields, "prompt")
    if len(prompts) > settings.prompts_max:
        raise fields.wrong("prompt", f"a list of at most {settings.prompts_max} prompts")
    return prompts
