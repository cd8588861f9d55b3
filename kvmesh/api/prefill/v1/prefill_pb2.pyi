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

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "generation", "rendezvous", "reservation_id", "wants_output")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    WANTS_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: _prompt_pb2.Generation
    rendezvous: _kv_pb2.Rendezvous
    reservation_id: str
    wants_output: bool
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[_Union[_prompt_pb2.Generation, _Mapping]] = ..., rendezvous: _Optional[_Union[_kv_pb2.Rendezvous, _Mapping]] = ..., reservation_id: _Optional[str] = ..., wants_output: _Optional[bool] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("handle", "usage", "queue_time", "compute_time", "output")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TIME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    handle: _kv_pb2.KvHandle
    usage: _output_pb2.Usage
    queue_time: _duration_pb2.Duration
    compute_time: _duration_pb2.Duration
    output: Output
    def __init__(self, handle: _Optional[_Union[_kv_pb2.KvHandle, _Mapping]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., compute_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., output: _Optional[_Union[Output, _Mapping]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("token_ids", "logprobs", "prompt_logprobs", "reason", "stop_token_id")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _output_pb2.Logprobs
    prompt_logprobs: _output_pb2.Logprobs
    reason: _output_pb2.FinishReason
    stop_token_id: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_output_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_output_pb2.Logprobs, _Mapping]] = ..., reason: _Optional[_Union[_output_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class ReleaseKvRequest(_message.Message):
    __slots__ = ("handle_id",)
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    handle_id: str
    def __init__(self, handle_id: _Optional[str] = ...) -> None: ...

class ReleaseKvResponse(_message.Message):
    __slots__ = ("was_held",)
    WAS_HELD_FIELD_NUMBER: _ClassVar[int]
    was_held: bool
    def __init__(self, was_held: _Optional[bool] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "calls", "cancels", "releases")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    calls: _containers.RepeatedCompositeFieldContainer[Call]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    releases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., calls: _Optional[_Iterable[_Union[Call, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ..., releases: _Optional[_Iterable[str]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("frontend_id",)
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    frontend_id: str
    def __init__(self, frontend_id: _Optional[str] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("number", "request", "timeout")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: PrefillRequest
    timeout: _duration_pb2.Duration
    def __init__(self, number: _Optional[int] = ..., request: _Optional[_Union[PrefillRequest, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "results")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    results: _containers.RepeatedCompositeFieldContainer[Result]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "epoch", "takes_packed_token_ids", "answers_single_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TAKES_PACKED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_SINGLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    takes_packed_token_ids: bool
    answers_single_tokens: bool
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., takes_packed_token_ids: _Optional[bool] = ..., answers_single_tokens: _Optional[bool] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("number", "response", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    response: PrefillResponse
    error: _errors_pb2.ErrorDetail
    def __init__(self, number: _Optional[int] = ..., response: _Optional[_Union[PrefillResponse, _Mapping]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...
