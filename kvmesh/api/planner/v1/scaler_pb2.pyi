import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvmesh.api.types.v1 import model_pb2 as _model_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScaleRequest(_message.Message):
    __slots__ = ("model", "role", "workers", "drain_worker_ids", "drain_timeout", "fencing_token")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    FENCING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _model_pb2.Role
    workers: int
    drain_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    drain_timeout: _duration_pb2.Duration
    fencing_token: int
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_model_pb2.Role, str]] = ..., workers: _Optional[int] = ..., drain_worker_ids: _Optional[_Iterable[str]] = ..., drain_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., fencing_token: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    def __init__(self, workers: _Optional[int] = ...) -> None: ...

class ListPoolsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPoolsResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("model", "role", "workers_running", "workers_wanted", "workers_max", "ready_worker_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_WANTED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_MAX_FIELD_NUMBER: _ClassVar[int]
    READY_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _model_pb2.Role
    workers_running: int
    workers_wanted: int
    workers_max: int
    ready_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_model_pb2.Role, str]] = ..., workers_running: _Optional[int] = ..., workers_wanted: _Optional[int] = ..., workers_max: _Optional[int] = ..., ready_worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...
