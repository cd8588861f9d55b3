import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvmesh.api.errors.v1 import errors_pb2 as _errors_pb2
from kvmesh.api.types.v1 import kv_pb2 as _kv_pb2
from kvmesh.api.types.v1 import output_pb2 as _output_pb2
from kvmesh.api.types.v1 import prompt_pb2 as _prompt_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LegTask(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_TASK_UNSPECIFIED: _ClassVar[LegTask]
    LEG_TASK_PREFILL: _ClassVar[LegTask]
    LEG_TASK_GENERATE: _ClassVar[LegTask]
    LEG_TASK_EMBED: _ClassVar[LegTask]
    LEG_TASK_ENCODE: _ClassVar[LegTask]
LEG_TASK_UNSPECIFIED: LegTask
LEG_TASK_PREFILL: LegTask
LEG_TASK_GENERATE: LegTask
LEG_TASK_EMBED: LegTask
LEG_TASK_ENCODE: LegTask

class Leg(_message.Message):
    __slots__ = ("leg_id", "task", "generation", "handle", "rendezvous", "dimensions", "reader")
    LEG_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    leg_id: str
    task: LegTask
    generation: _prompt_pb2.Generation
    handle: _kv_pb2.KvHandle
    rendezvous: _kv_pb2.Rendezvous
    dimensions: int
    reader: _kv_pb2.KvReader
    def __init__(self, leg_id: _Optional[str] = ..., task: _Optional[_Union[LegTask, str]] = ..., generation: _Optional[_Union[_prompt_pb2.Generation, _Mapping]] = ..., handle: _Optional[_Union[_kv_pb2.KvHandle, _Mapping]] = ..., rendezvous: _Optional[_Union[_kv_pb2.Rendezvous, _Mapping]] = ..., dimensions: _Optional[int] = ..., reader: _Optional[_Union[_kv_pb2.KvReader, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "submissions", "cancels", "releases")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submissions: _containers.RepeatedCompositeFieldContainer[Submission]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    releases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submissions: _Optional[_Iterable[_Union[Submission, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ..., releases: _Optional[_Iterable[str]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("frontend_id",)
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    frontend_id: str
    def __init__(self, frontend_id: _Optional[str] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("slot", "leg", "timeout")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    leg: Leg
    timeout: _duration_pb2.Duration
    def __init__(self, slot: _Optional[int] = ..., leg: _Optional[_Union[Leg, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "frame")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    frame: StepFrame
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., frame: _Optional[_Union[StepFrame, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "epoch", "heartbeat", "submissions_max", "tasks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SUBMISSIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    heartbeat: _duration_pb2.Duration
    submissions_max: int
    tasks: _containers.RepeatedScalarFieldContainer[LegTask]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., heartbeat: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., submissions_max: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[LegTask, str]]] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("step", "slots", "counts", "token_ids", "logprobs", "prompt_logprobs", "finishes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    step: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[SlotLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[SlotLogprobs]
    finishes: _containers.RepeatedCompositeFieldContainer[Finish]
    def __init__(self, step: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[SlotLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[SlotLogprobs, _Mapping]]] = ..., finishes: _Optional[_Iterable[_Union[Finish, _Mapping]]] = ...) -> None: ...

class SlotLogprobs(_message.Message):
    __slots__ = ("slot", "logprobs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    logprobs: _output_pb2.Logprobs
    def __init__(self, slot: _Optional[int] = ..., logprobs: _Optional[_Union[_output_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("slot", "reason", "stop_token_id", "error", "usage", "was_recomputed", "handle", "embedding", "encoded_media")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    WAS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    ENCODED_MEDIA_FIELD_NUMBER: _ClassVar[int]
    slot: int
    reason: _output_pb2.FinishReason
    stop_token_id: int
    error: _errors_pb2.ErrorDetail
    usage: _output_pb2.Usage
    was_recomputed: bool
    handle: _kv_pb2.KvHandle
    embedding: Embedding
    encoded_media: EncodedMedia
    def __init__(self, slot: _Optional[int] = ..., reason: _Optional[_Union[_output_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ..., was_recomputed: _Optional[bool] = ..., handle: _Optional[_Union[_kv_pb2.KvHandle, _Mapping]] = ..., embedding: _Optional[_Union[Embedding, _Mapping]] = ..., encoded_media: _Optional[_Union[EncodedMedia, _Mapping]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class EncodedMedia(_message.Message):
    __slots__ = ("encoder_handles",)
    ENCODER_HANDLES_FIELD_NUMBER: _ClassVar[int]
    encoder_handles: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, encoder_handles: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("leg",)
    LEG_FIELD_NUMBER: _ClassVar[int]
    leg: Leg
    def __init__(self, leg: _Optional[_Union[Leg, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "logprobs", "prompt_logprobs", "finish")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _output_pb2.Logprobs
    prompt_logprobs: _output_pb2.Logprobs
    finish: Finish
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_output_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_output_pb2.Logprobs, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...

class ReleaseKvRequest(_message.Message):
    __slots__ = ("handle_id", "leg_id")
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    LEG_ID_FIELD_NUMBER: _ClassVar[int]
    handle_id: str
    leg_id: str
    def __init__(self, handle_id: _Optional[str] = ..., leg_id: _Optional[str] = ...) -> None: ...

class ReleaseKvResponse(_message.Message):
    __slots__ = ("was_held",)
    WAS_HELD_FIELD_NUMBER: _ClassVar[int]
    was_held: bool
    def __init__(self, was_held: _Optional[bool] = ...) -> None: ...
