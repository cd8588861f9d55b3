"""The Open Inference Protocol (KServe v2).

Every input tensor has one element and is treated like a parameter of its name.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from kvmesh.api.inference import grpc_service_pb2 as pb
from kvmesh.checks import check_length
from kvmesh.errors import InvalidRequestError, NotFoundError, UnsupportedError
from kvmesh.rpc.codec.scalars import required_text

VERSION = "1"
MODEL_CHARACTERS_MAX = 256
ID_BYTES_MAX = 1024
NAME_CHARACTERS_MAX = 128
VALUES_MAX = 128
SHAPE_MAX = 8
FINAL = "triton_final_response"
TEXT_INPUT = "text_input"
# Numeric types: the format of one packed element, and the field of `contents` that holds the elements.
_PACKED: Mapping[str, tuple[str, str]] = {
    "BOOL": ("<?", "bool_contents"),
    "INT8": ("<b", "int_contents"),
    "INT16": ("<h", "int_contents"),
    "INT32": ("<i", "int_contents"),
    "INT64": ("<q", "int64_contents"),
    "UINT8": ("<B", "uint_contents"),
    "UINT16": ("<H", "uint_contents"),
    "UINT32": ("<I", "uint_contents"),
    "UINT64": ("<Q", "uint64_contents"),
    "FP32": ("<f", "fp32_contents"),
    "FP64": ("<d", "fp64_contents"),
}
_BYTES = "BYTES"
_LENGTH = struct.Struct("<I")
_Tensor = pb.ModelInferRequest.InferInputTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """One request. `outputs` are the names of the requested outputs; empty: the default ones."""

    model: str
    call_id: str
    inputs: Mapping[str, Any]
    parameters: Mapping[str, Any]
    outputs: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An output tensor. `datatype` is BYTES, FP32 or UINT32."""

    name: str
    datatype: str
    values: Sequence[Any]


def check_version(version: str, field: str) -> None:
    if version not in ("", VERSION):
        raise NotFoundError(f"{field} must be {VERSION} or empty", field=field, reason="version_not_found")


def from_infer_request(message: pb.ModelInferRequest) -> InferCall:
    """Returns the value. The names of inputs, parameters and outputs are not checked."""
    check_version(message.model_version, field="model_version")
    check_length(len(message.id.encode()), "id", high=ID_BYTES_MAX, unit="bytes")
    check_length(len(message.inputs), "inputs", low=1, high=VALUES_MAX)
    check_length(len(message.parameters), "parameters", high=VALUES_MAX)
    check_length(len(message.outputs), "outputs", high=VALUES_MAX)
    return InferCall(
        model=required_text(message.model_name, field="model_name", characters_max=MODEL_CHARACTERS_MAX),
        call_id=message.id,
        inputs=_inputs(message),
        parameters={
            required_text(name, field="parameters", characters_max=NAME_CHARACTERS_MAX): _parameter(
                value, f"parameters.{name}"
            )
            for name, value in message.parameters.items()
        },
        outputs=[_output(each) for each in message.outputs],
    )


def _parameter(value: pb.InferParameter, field: str) -> Any:
    kind = value.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidRequestError(f"{field} must have a value", field=field)
    return getattr(value, kind)


def _output(output: pb.ModelInferRequest.InferRequestedOutputTensor) -> str:
    name = required_text(output.name, field="outputs.name", characters_max=NAME_CHARACTERS_MAX)
    _refuse_parameters(output.parameters, f"outputs.{name}")
    return name


def _inputs(message: pb.ModelInferRequest) -> dict[str, Any]:
    raws = message.raw_input_contents
    if raws and len(raws) != len(message.inputs):
        raise InvalidRequestError(
            f"raw_input_contents must have {len(message.inputs)} entries or none, not {len(raws)}",
            field="raw_input_contents",
        )
    found: dict[str, Any] = {}
    for i, tensor in enumerate(message.inputs):
        name = required_text(tensor.name, field=f"inputs[{i}].name", characters_max=NAME_CHARACTERS_MAX)
        if name in found:
            raise InvalidRequestError(f"inputs.{name} is given twice", field=f"inputs.{name}")
        found[name] = _element(tensor, raws[i] if raws else None, f"inputs.{name}")
    return found


def _element(tensor: _Tensor, raw: bytes | None, field: str) -> Any:
    """Returns the one element of a tensor."""
    _refuse_parameters(tensor.parameters, field)
    if len(tensor.shape) > SHAPE_MAX or prod(tensor.shape) != 1 or min(tensor.shape, default=1) < 1:
        raise InvalidRequestError(f"{field} must have the shape [1]", field=field)
    if raw is not None and tensor.HasField("contents"):
        raise InvalidRequestError(f"{field} must not have contents beside raw_input_contents", field=field)
    if tensor.datatype == _BYTES:
        data = _bytes_of(raw, field) if raw is not None else _only(tensor.contents.bytes_contents, field)
        return _text(data, field)
    if tensor.datatype not in _PACKED:
        known = ", ".join((_BYTES, *_PACKED))
        raise InvalidRequestError(f"{field} must have one of the datatypes {known}", field=field)
    form, contents = _PACKED[tensor.datatype]
    if raw is None:
        return _only(getattr(tensor.contents, contents), field)
    if len(raw) != struct.calcsize(form):
        raise InvalidRequestError(f"{field} must have {struct.calcsize(form)} bytes, not {len(raw)}", field=field)
    return struct.unpack(form, raw)[0]


def _refuse_parameters(parameters: Mapping[str, Any], field: str) -> None:
    if parameters:
        raise UnsupportedError(
            f"{field}.parameters are not supported: there is no shared memory and no classification",
            field=f"{field}.parameters",
        )


def _only(values: Sequence[Any], field: str) -> Any:
    if len(values) != 1:
        raise InvalidRequestError(f"{field} must have 1 element, not {len(values)}", field=field)
    return values[0]


def _bytes_of(raw: bytes, field: str) -> bytes:
    """Returns the one element of a packed BYTES tensor, which follows its length."""
    if len(raw) < _LENGTH.size or _LENGTH.unpack_from(raw)[0] != len(raw) - _LENGTH.size:
        raise InvalidRequestError(f"{field} must have one element after its length in 4 bytes", field=field)
    return raw[_LENGTH.size :]


def _text(data: bytes, field: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{field} must be UTF-8", field=field) from None


def to_infer_response(
    *, model: str, call_id: str, tensors: Sequence[Tensor], is_final: bool | None = None
) -> pb.ModelInferResponse:
    """Returns a response, or part of one. `is_final` is None outside streams."""
    message = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=call_id)
    if is_final is not None:
        message.parameters[FINAL].bool_param = is_final
    for tensor in tensors:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=[len(tensor.values)])
        message.raw_output_contents.append(_packed(tensor))
    return message


def to_stream_response(response: pb.ModelInferResponse) -> pb.ModelStreamInferResponse:
    return pb.ModelStreamInferResponse(infer_response=response)


def to_stream_error(*, model: str, call_id: str, message: str) -> pb.ModelStreamInferResponse:
    response = to_infer_response(model=model, call_id=call_id, tensors=(), is_final=True)
    return pb.ModelStreamInferResponse(error_message=message or "failed", infer_response=response)


def _packed(tensor: Tensor) -> bytes:
    if tensor.datatype == _BYTES:
        return b"".join(_LENGTH.pack(len(value)) + value for value in tensor.values)
    form = "<" + str(len(tensor.values)) + _PACKED[tensor.datatype][0][1:]
    return struct.pack(form, *tensor.values)


def to_model_metadata(name: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> pb.ModelMetadataResponse:
    """`inputs` and `outputs` map names to datatypes."""
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform="kvmesh",
        inputs=[tensor(name=each, datatype=kind, shape=[1]) for each, kind in inputs.items()],
        outputs=[tensor(name=each, datatype=kind, shape=[-1]) for each, kind in outputs.items()],
    )


_DATA_TYPES: Mapping[str, pb.DataType] = {
    "BOOL": pb.TYPE_BOOL,
    "UINT32": pb.TYPE_UINT32,
    "FP32": pb.TYPE_FP32,
    _BYTES: pb.TYPE_STRING,
}


def to_model_config(name: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> pb.ModelConfigResponse:
    """Returns the tensors in the form of Triton's model configuration; both arguments map names to types."""
    config = pb.ModelConfig(
        name=name,
        platform="kvmesh",
        backend="kvmesh",
        input=[
            pb.ModelInput(name=each, data_type=_DATA_TYPES[kind], dims=[1], optional=each != TEXT_INPUT)
            for each, kind in inputs.items()
        ],
        output=[pb.ModelOutput(name=each, data_type=_DATA_TYPES[kind], dims=[-1]) for each, kind in outputs.items()],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )
    return pb.ModelConfigResponse(config=config)


@dataclass(slots=True, kw_only=True)
class InferCounts:
    """Requests to one model that have ended. Durations in seconds, `last_began_s` in seconds since 1970."""

    answered: int = 0
    answered_s: float = 0.0
    failed: int = 0
    failed_s: float = 0.0
    last_began_s: float = 0.0


def to_model_statistics(counts: Mapping[str, InferCounts]) -> pb.ModelStatisticsResponse:
    """Returns the statistics by model."""
    return pb.ModelStatisticsResponse(
        model_stats=[
            pb.ModelStatistics(
                name=name,
                version=VERSION,
                last_inference=int(each.last_began_s * 1e3),
                inference_count=each.answered,
                execution_count=each.answered,
                inference_stats=pb.InferStatistics(
                    success=pb.StatisticDuration(count=each.answered, ns=int(each.answered_s * 1e9)),
                    fail=pb.StatisticDuration(count=each.failed, ns=int(each.failed_s * 1e9)),
                ),
            )
            for name, each in counts.items()
        ]
    )
