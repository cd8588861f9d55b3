import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvmesh.api.types.v1 import kv_pb2 as _kv_pb2
from kvmesh.api.types.v1 import output_pb2 as _output_pb2
from kvmesh.api.types.v1 import prompt_pb2 as _prompt_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "generation", "rendezvous", "reservation_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: _prompt_pb2.Generation
    rendezvous: _kv_pb2.Rendezvous
    reservation_id: str
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[_Union[_prompt_pb2.Generation, _Mapping]] = ..., rendezvous: _Optional[_Union[_kv_pb2.Rendezvous, _Mapping]] = ..., reservation_id: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("handle", "usage", "queue_time", "compute_time")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TIME_FIELD_NUMBER: _ClassVar[int]
    handle: _kv_pb2.KvHandle
    usage: _output_pb2.Usage
    queue_time: _duration_pb2.Duration
    compute_time: _duration_pb2.Duration
    def __init__(self, handle: _Optional[_Union[_kv_pb2.KvHandle, _Mapping]] = ..., usage: _Optional[_Union[_output_pb2.Usage, _Mapping]] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., compute_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

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
