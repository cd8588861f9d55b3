"""Reads input tensors and parameters as Triton's vLLM backend does. The sampling fields are those of the completions API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import orjson
from msgspec import Meta

from kvmesh.core import SamplingParams
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.kserve import TEXT_INPUT, InferCall
from kvmesh.telemetry import current_traceparent
from services.frontend.api.grpc.requests import timeout_s
from services.frontend.api.openai.completion_request import MAX_TOKENS_DEFAULT
from services.frontend.api.openai.sampling import SamplingFields, sampling_params
from services.frontend.api.request_body import (
    INTEGER_MAX,
    TOKENS_MAX,
    Ignored,
    invalid_value,
    object_in,
    read_body,
    refused,
)
from services.frontend.pipeline.request import Request

SAMPLING = "sampling_parameters"
EXCLUDE = "exclude_input_in_output"
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
_PREFIX = "parameters."


class KserveParameters(SamplingFields, kw_only=True):
    """Input tensors except the text, parameters, and the document of `sampling_parameters`, in one object."""

    logprobs: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    stream: bool | None = None
    exclude_input_in_output: bool | None = None
    return_finish_reason: bool | None = None
    return_cumulative_logprob: bool | None = None
    return_logprobs: bool | None = None
    return_num_input_tokens: bool | None = None
    return_num_output_tokens: bool | None = None
    triton_enable_empty_final_response: bool | None = None
    timeout: Annotated[int, Meta(ge=0, le=INTEGER_MAX, description="Microseconds.")] | None = None
    lora_name: Annotated[str, Meta(max_length=256)] | None = None
    sequence_id: int | str | None = None
    sequence_start: Ignored = None
    sequence_end: Ignored = None
    priority: Annotated[Any, refused("Triton's priority levels do not match the mesh's", 0)] = None


_SAMPLING_NAMES = [each.name for each in fields(SamplingParams)]
_NAMES = {name: f"{_PREFIX}{name}" for name in (*_SAMPLING_NAMES, "cache_salt")}
# Old Triton clients can send only strings and integers, so a string may contain these as JSON.
_NUMBERS = {*_SAMPLING_NAMES, "n", "truncate_prompt_tokens", "include_stop_str_in_output"} - {"stop", "constraint"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """A parsed request. `echo` precedes the text of every choice."""

    request: Request
    is_stream: bool
    echo: str
    outputs: frozenset[str]
    ends_with_empty: bool


def read_inference(call: InferCall, request_id: str, left_s: float | None, *, choices_max: int) -> Inference:
    """Reads a call. `left_s`: seconds until its deadline. InvalidRequestError and UnsupportedError name the field."""
    text = call.inputs.get(TEXT_INPUT)
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(
            f"inputs.{TEXT_INPUT} must be a BYTES tensor with a text", field=f"inputs.{TEXT_INPUT}"
        )
    body = read_body(KserveParameters, _values(call), _PREFIX)
    is_stream = bool(body.stream)
    excludes = is_stream if body.exclude_input_in_output is None else body.exclude_input_in_output
    if is_stream and not excludes:
        raise invalid_value(_PREFIX + EXCLUDE, wanted="true when stream is true")
    outputs = _outputs(call.outputs, body)
    choices = body.n or 1
    if choices > choices_max:
        raise invalid_value(f"{_PREFIX}n", wanted=f"an integer from 1 to {choices_max}")
    request = _request(call, body, request_id, outputs=outputs)
    timeout = timeout_s(own_s=body.timeout / 1e6 if body.timeout else None, left_s=left_s)
    return Inference(
        request=replace(request, prompt=text, timeout_s=timeout, choices=choices),
        is_stream=is_stream,
        echo="" if excludes else text,
        outputs=outputs,
        ends_with_empty=bool(body.triton_enable_empty_final_response),
    )


def _values(call: InferCall) -> dict[str, Any]:
    """Merges tensors, parameters and the document of `sampling_parameters`. Refuses a name that is given twice."""
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
    document = object_in(text) if isinstance(text, str) else None
    if document is None:
        raise InvalidRequestError(f"inputs.{SAMPLING} must be a JSON object", field=f"inputs.{SAMPLING}")
    return document


def _number(name: str, value: Any) -> Any:
    if name not in _NUMBERS or not isinstance(value, str):
        return value
    try:
        return orjson.loads(value.lower())
    except orjson.JSONDecodeError:
        return value


def _outputs(asked: Sequence[str], body: KserveParameters) -> frozenset[str]:
    for name in asked:
        if name not in OUTPUTS:
            raise InvalidRequestError(f"outputs.{name} must be one of {', '.join(OUTPUTS)}", field=f"outputs.{name}")
    flagged = {name for name in OUTPUTS if name != "text_output" and getattr(body, f"return_{name}")}
    return frozenset(asked or {"text_output"}) | flagged


def _request(call: InferCall, body: KserveParameters, request_id: str, *, outputs: frozenset[str]) -> Request:
    try:
        constraint, constraint_name = body.constraint()
    except InvalidRequestError as error:
        raise InvalidRequestError(_PREFIX + error.message, field=_PREFIX + error.field, reason=error.reason) from None
    logprobs = body.logprobs
    if logprobs is None and outputs & {"cumulative_logprob", "logprobs"}:
        logprobs = 0
    return Request(
        request_id=request_id,
        model=call.model,
        prompt="",
        sampling=sampling_params(
            body,
            max_tokens=MAX_TOKENS_DEFAULT if body.max_tokens is None else body.max_tokens,
            logprobs=logprobs,
            constraint=constraint,
        ),
        adapter=body.lora_name or "",
        cache_salt=body.cache_salt or "",
        session_id=_session(body.sequence_id),
        prompt_tokens_kept=body.truncate_prompt_tokens,
        includes_stop=bool(body.include_stop_str_in_output),
        traceparent=current_traceparent(),
        fields={
            **_NAMES,
            "prompt": f"inputs.{TEXT_INPUT}",
            "choices": f"{_PREFIX}n",
            "adapter": f"{_PREFIX}lora_name",
            "constraint": _PREFIX + constraint_name,
        },
    )


def _session(value: int | str | None) -> str:
    # Requests of one Triton sequence go to the worker that has their prefix.
    session = "" if value is None else str(value)
    if len(session) > 128:
        raise invalid_value(f"{_PREFIX}sequence_id", wanted="a whole number or a short text")
    return session
