import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvmesh.api.types.v1 import kv_pb2 as _kv_pb2
from kvmesh.api.types.v1 import load_pb2 as _load_pb2
from kvmesh.api.types.v1 import model_pb2 as _model_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker", "role", "model", "capabilities", "kv_compatibility_hash", "block_size_tokens", "kv_blocks_total", "lease", "rendezvous_address", "is_draining", "profile", "requires_prefill", "rank_rendezvous_addresses")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    KV_COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_PREFILL_FIELD_NUMBER: _ClassVar[int]
    RANK_RENDEZVOUS_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    worker: _model_pb2.WorkerRef
    role: _model_pb2.Role
    model: _model_pb2.ModelCard
    capabilities: _model_pb2.Capabilities
    kv_compatibility_hash: str
    block_size_tokens: int
    kv_blocks_total: int
    lease: _duration_pb2.Duration
    rendezvous_address: str
    is_draining: bool
    profile: _model_pb2.PerformanceProfile
    requires_prefill: bool
    rank_rendezvous_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker: _Optional[_Union[_model_pb2.WorkerRef, _Mapping]] = ..., role: _Optional[_Union[_model_pb2.Role, str]] = ..., model: _Optional[_Union[_model_pb2.ModelCard, _Mapping]] = ..., capabilities: _Optional[_Union[_model_pb2.Capabilities, _Mapping]] = ..., kv_compatibility_hash: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., rendezvous_address: _Optional[str] = ..., is_draining: _Optional[bool] = ..., profile: _Optional[_Union[_model_pb2.PerformanceProfile, _Mapping]] = ..., requires_prefill: _Optional[bool] = ..., rank_rendezvous_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchKvRequest(_message.Message):
    __slots__ = ("resume_epoch", "resume_sequence")
    RESUME_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESUME_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    resume_epoch: int
    resume_sequence: int
    def __init__(self, resume_epoch: _Optional[int] = ..., resume_sequence: _Optional[int] = ...) -> None: ...

class WatchKvResponse(_message.Message):
    __slots__ = ("epoch", "sequence", "is_snapshot", "is_complete", "events", "part")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    is_snapshot: bool
    is_complete: bool
    events: _containers.RepeatedCompositeFieldContainer[_kv_pb2.KvEvent]
    part: int
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., is_complete: _Optional[bool] = ..., events: _Optional[_Iterable[_Union[_kv_pb2.KvEvent, _Mapping]]] = ..., part: _Optional[int] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _load_pb2.LoadRecord
    def __init__(self, load: _Optional[_Union[_load_pb2.LoadRecord, _Mapping]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout", "undo", "exits")
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    EXITS_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    undo: bool
    exits: bool
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., undo: _Optional[bool] = ..., exits: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("requests_in_flight",)
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    requests_in_flight: int
    def __init__(self, requests_in_flight: _Optional[int] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role", "fencing_token")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FENCING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    role: _model_pb2.Role
    fencing_token: int
    def __init__(self, role: _Optional[_Union[_model_pb2.Role, str]] = ..., fencing_token: _Optional[int] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: _model_pb2.Role
    def __init__(self, role: _Optional[_Union[_model_pb2.Role, str]] = ...) -> None: ...

class ResetCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetCacheResponse(_message.Message):
    __slots__ = ("is_reset",)
    IS_RESET_FIELD_NUMBER: _ClassVar[int]
    is_reset: bool
    def __init__(self, is_reset: _Optional[bool] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: int
    def __init__(self, level: _Optional[int] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckKvPathRequest(_message.Message):
    __slots__ = ("source",)
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source: _model_pb2.WorkerRef
    def __init__(self, source: _Optional[_Union[_model_pb2.WorkerRef, _Mapping]] = ...) -> None: ...

class CheckKvPathResponse(_message.Message):
    __slots__ = ("is_ok", "reason", "detail", "elapsed")
    IS_OK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    is_ok: bool
    reason: str
    detail: str
    elapsed: _duration_pb2.Duration
    def __init__(self, is_ok: _Optional[bool] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListKvPathsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListKvPathsResponse(_message.Message):
    __slots__ = ("paths",)
    PATHS_FIELD_NUMBER: _ClassVar[int]
    paths: _containers.RepeatedCompositeFieldContainer[KvPath]
    def __init__(self, paths: _Optional[_Iterable[_Union[KvPath, _Mapping]]] = ...) -> None: ...

class KvPath(_message.Message):
    __slots__ = ("worker_id", "pulls_total", "failures_total", "reason", "detail", "last_failure_at", "bytes_per_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PULLS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FAILURES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_AT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pulls_total: int
    failures_total: int
    reason: str
    detail: str
    last_failure_at: _timestamp_pb2.Timestamp
    bytes_per_s: float
    def __init__(self, worker_id: _Optional[str] = ..., pulls_total: _Optional[int] = ..., failures_total: _Optional[int] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., last_failure_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class FetchModelFilesRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class FetchModelFilesResponse(_message.Message):
    __slots__ = ("path", "data", "is_last")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    path: str
    data: bytes
    is_last: bool
    def __init__(self, path: _Optional[str] = ..., data: _Optional[bytes] = ..., is_last: _Optional[bool] = ...) -> None: ...
