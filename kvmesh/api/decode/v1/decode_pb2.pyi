import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvmesh.api.errors.v1 import errors_pb2 as _errors_pb2
from kvmesh.api.types.v1 import kv_pb2 as _kv_pb2
from kvmesh.api.types.v1 import output_pb2 as _output_pb2
from kvmesh.api.types.v1 import prompt_pb2 as _prompt_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("hello", "submissions", "cancels")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submissions: _containers.RepeatedCompositeFieldContainer[Submission]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submissions: _Optional[_Iterable[_Union[Submission, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("frontend_id",)
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    frontend_id: str
    def __init__(self, frontend_id: _Optional[str] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("slot", "request_id", "generation", "handle", "rendezvous", "timeout", "reservation_id")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: str
    generation: _prompt_pb2.Generation
    handle: _kv_pb2.KvHandle
    rendezvous: _kv_pb2.Rendezvous
    timeout: _duration_pb2.Duration
    reservation_id: str
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[str] = ..., generation: _Optional[_Union[_prompt_pb2.Generation, _Mapping]] = ..., handle: _Optional[_Union[_kv_pb2.KvHandle, _Mapping]] = ..., rendezvous: _Optional[_Union[_kv_pb2.Rendezvous, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reservation_id: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "frame")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    frame: StepFrame
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., frame: _Optional[_Union[StepFrame, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "epoch", "heartbeat", "submissions_max", "takes_packed_token_ids")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SUBMISSIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    TAKES_PACKED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    heartbeat: _duration_pb2.Duration
    submissions_max: int
    takes_packed_token_ids: bool
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., heartbeat: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., submissions_max: _Optional[int] = ..., takes_packed_token_ids: _Optional[bool] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("step", "slots", "counts", "token_ids", "logprobs", "finishes", "prompt_logprobs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[SlotLogprobs]
    finishes: _containers.RepeatedCompositeFieldContainer[Finish]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[SlotLogprobs]
    def __init__(self, step: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[SlotLogprobs, _Mapping]]] = ..., finishes: _Optional[_Iterable[_Union[Finish, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[SlotLogprobs, _Mapping]]] = ...) -> None: ...

class SlotLogprobs(_message.Message):
    __slots__ = ("slot", "logprobs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    logprobs: _output_pb2.Logprobs
    def __init__(self, slot: _Optional[int] = ..., logprobs: _Optional[_Union[_output_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("slot", "reason", "stop_token_id", "error", "usage", "was_recomputed")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    WAS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    slot: int
    reason: _output_pb2.FinishReason
    stop_token_id: int
    error: _errors_pb2.ErrorDetail
    usage: _output_pb2.Usage
    was_recomputed: bool
    def __init__(self, slot: _Optional[int] = ..., reason: _Optional[_Union[_output_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ..., was_recomputed: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "generation", "handle", "rendezvous")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: _prompt_pb2.Generation
    handle: _kv_pb2.KvHandle
    rendezvous: _kv_pb2.Rendezvous
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[_Union[_prompt_pb2.Generation, _Mapping]] = ..., handle: _Optional[_Union[_kv_pb2.KvHandle, _Mapping]] = ..., rendezvous: _Optional[_Union[_kv_pb2.Rendezvous, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "logprobs", "finish", "prompt_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _output_pb2.Logprobs
    finish: Finish
    prompt_logprobs: _output_pb2.Logprobs
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_output_pb2.Logprobs, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_output_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "model", "inputs", "dimensions", "adapter", "priority", "traceparent", "reservation_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[EmbedInput]
    dimensions: int
    adapter: str
    priority: int
    traceparent: str
    reservation_id: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[EmbedInput, _Mapping]]] = ..., dimensions: _Optional[int] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ..., reservation_id: _Optional[str] = ...) -> None: ...

class EmbedInput(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("vectors", "usage")
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    vectors: _containers.RepeatedCompositeFieldContainer[EmbedVector]
    usage: _output_pb2.Usage
    def __init__(self, vectors: _Optional[_Iterable[_Union[EmbedVector, _Mapping]]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ...) -> None: ...

class EmbedVector(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...
