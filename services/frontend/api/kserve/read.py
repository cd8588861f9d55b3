"""What tensors and parameters mean, after Triton's vLLM backend; the sampling fields are those of the completions API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.kserve import TEXT_INPUT, InferCall
from kvmesh.telemetry import current_traceparent
from services.frontend.api.grpc.requests import timeout_s
from services.frontend.api.openai.completion_request import MAX_TOKENS_DEFAULT
from services.frontend.api.openai.constraints import read_constraint
from services.frontend.api.openai.fields import INTEGER_MAX, Fields
from services.frontend.api.openai.sampling import TOKENS_MAX, read_sampling, read_truncation
from services.frontend.pipeline.request import Request

SAMPLING = "sampling_parameters"
EXCLUDE = "exclude_input_in_output"
EMPTY_FINAL = "triton_enable_empty_final_response"
INPUTS: Mapping[str, str] = {
    TEXT_INPUT: "BYTES",
    "stream": "BOOL",
    SAMPLING: "BYTES",
    EXCLUDE: "BOOL",
    "return_finish_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_logprobs": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS: Mapping[str, str] = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
# Triton's clients of old could write texts and whole numbers only, so numbers may come as texts.
_NUMBERS = frozenset({
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "n", "truncate_prompt_tokens", "ignore_eos",
    "skip_special_tokens", "include_stop_str_in_output", "stop_token_ids", "logit_bias",
})  # fmt: skip
_PREFIX = "parameters."
_NAMES = {name: f"{_PREFIX}{name}" for name in (*_NUMBERS, "stop", "cache_salt")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """One request, read. `echo` comes before the text of every choice."""

    request: Request
    is_stream: bool
    echo: str
    outputs: frozenset[str]
    ends_with_empty: bool


def read_inference(call: InferCall, request_id: str, left_s: float | None, choices_max: int) -> Inference:
    """InvalidRequestError and UnsupportedError name the tensor or parameter."""
    text = call.inputs.get(TEXT_INPUT)
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(
            f"inputs.{TEXT_INPUT} must be a BYTES tensor with a text", field=f"inputs.{TEXT_INPUT}"
        )
    fields = Fields(_values(call), _PREFIX)
    is_stream = fields.flag("stream")
    excludes = fields.flag(EXCLUDE, is_stream)
    if is_stream and not excludes:
        raise fields.wrong(EXCLUDE, "true when stream is true")
    outputs = _outputs(call.outputs, fields)
    request = _request(call, fields, text, request_id, left_s, choices_max, outputs)
    ends_with_empty = fields.flag(EMPTY_FINAL)
    fields.refuse("priority", "Triton's levels are not the mesh's", (0,))
    fields.ignore(("sequence_start", "sequence_end"))
    fields.finish()
    return Inference(
        request=request,
        is_stream=is_stream,
        echo="" if excludes else text,
        outputs=outputs,
        ends_with_empty=ends_with_empty,
    )


def _values(call: InferCall) -> dict[str, Any]:
    """Tensors, parameters and the document of `sampling_parameters` as one; what is given twice is refused."""
    values = {name: value for name, value in call.inputs.items() if name not in (TEXT_INPUT, SAMPLING)}
    document = _document(call.inputs.get(SAMPLING))
    for more in (call.parameters, document):
        if twice := sorted(values.keys() & more.keys()):
            name = _PREFIX + twice[0][:64]
            raise InvalidRequestError(f"{name} is given twice", field=name)
        values.update(more)
    return {name: _number(name, value) for name, value in values.items()}


def _document(text: Any) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        document = orjson.loads(text) if isinstance(text, str) else None
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
        raise InvalidRequestError(f"inputs.{SAMPLING} must be a JSON object", field=f"inputs.{SAMPLING}")
    return document


def _number(name: str, value: Any) -> Any:
    if name not in _NUMBERS or not isinstance(value, str):
        return value
    try:
        return orjson.loads(value.lower())
    except orjson.JSONDecodeError:
        return value


def _outputs(asked: Sequence[str], fields: Fields) -> frozenset[str]:
    for name in asked:
        if name not in OUTPUTS:
            raise InvalidRequestError(f"outputs.{name} must be one of {', '.join(OUTPUTS)}", field=f"outputs.{name}")
    flagged = {name for name in OUTPUTS if name != "text_output" and fields.flag(f"return_{name}")}
    return frozenset(asked or {"text_output"}) | flagged


def _request(
    call: InferCall,
    fields: Fields,
    text: str,
    request_id: str,
    left_s: float | None,
    choices_max: int,
    outputs: frozenset[str],
) -> Request:
    constraint, constraint_name = read_constraint(fields)
    max_tokens = fields.integer("max_tokens", 1, TOKENS_MAX)
    logprobs = fields.integer("logprobs", 0, TOKENS_MAX)
    if logprobs is None and outputs & {"cumulative_logprob", "logprobs"}:
        logprobs = 0
    timeout_us = fields.integer("timeout", 0, INTEGER_MAX)
    return Request(
        request_id=request_id,
        model=call.model,
        prompt=text,
        sampling=read_sampling(
            fields,
            max_tokens=MAX_TOKENS_DEFAULT if max_tokens is None else max_tokens,
            logprobs=logprobs,
            constraint=constraint,
        ),
        choices=fields.integer("n", 1, choices_max) or 1,
        adapter=fields.text("lora_name", 256) or "",
        cache_salt=fields.text("cache_salt", 256) or "",
        session_id=_session(fields),
        prompt_tokens_kept=read_truncation(fields),
        includes_stop=fields.flag("include_stop_str_in_output"),
        timeout_s=timeout_s(timeout_us / 1e6 if timeout_us else None, left_s),
        traceparent=current_traceparent(),
        fields={
            **_NAMES,
            "prompt": f"inputs.{TEXT_INPUT}",
            "choices": f"{_PREFIX}n",
            "adapter": f"{_PREFIX}lora_name",
            "constraint": _PREFIX + constraint_name,
        },
    )


def _session(fields: Fields) -> str:
    """Triton's sequence is a session here: its requests go where their prefix is."""
    value = fields.take("sequence_id")
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | str) or len(str(value)) > 128:
        raise fields.wrong("sequence_id", "a whole number or a short text")
    return str(value)
