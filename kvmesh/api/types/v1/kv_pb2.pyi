import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_TIER_UNSPECIFIED: _ClassVar[KvTier]
    KV_TIER_DEVICE: _ClassVar[KvTier]
    KV_TIER_HOST: _ClassVar[KvTier]
    KV_TIER_DISK: _ClassVar[KvTier]
    KV_TIER_OBJECT: _ClassVar[KvTier]
    KV_TIER_PEER: _ClassVar[KvTier]

class Handoff(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDOFF_UNSPECIFIED: _ClassVar[Handoff]
    HANDOFF_SEQUENTIAL: _ClassVar[Handoff]
    HANDOFF_RENDEZVOUS: _ClassVar[Handoff]
    HANDOFF_PUSH: _ClassVar[Handoff]
KV_TIER_UNSPECIFIED: KvTier
KV_TIER_DEVICE: KvTier
KV_TIER_HOST: KvTier
KV_TIER_DISK: KvTier
KV_TIER_OBJECT: KvTier
KV_TIER_PEER: KvTier
HANDOFF_UNSPECIFIED: Handoff
HANDOFF_SEQUENTIAL: Handoff
HANDOFF_RENDEZVOUS: Handoff
HANDOFF_PUSH: Handoff

class KvHandle(_message.Message):
    __slots__ = ("handle_id", "format", "compatibility_hash", "payload", "worker_id", "worker_epoch", "tokens", "kv_bytes", "lease", "first_token_ids", "seal")
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    handle_id: str
    format: str
    compatibility_hash: str
    payload: bytes
    worker_id: str
    worker_epoch: int
    tokens: int
    kv_bytes: int
    lease: _duration_pb2.Duration
    first_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seal: bytes
    def __init__(self, handle_id: _Optional[str] = ..., format: _Optional[str] = ..., compatibility_hash: _Optional[str] = ..., payload: _Optional[bytes] = ..., worker_id: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., first_token_ids: _Optional[_Iterable[int]] = ..., seal: _Optional[bytes] = ...) -> None: ...

class KvReader(_message.Message):
    __slots__ = ("worker_id", "leg_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEG_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    leg_id: str
    def __init__(self, worker_id: _Optional[str] = ..., leg_id: _Optional[str] = ...) -> None: ...

class Rendezvous(_message.Message):
    __slots__ = ("host", "port", "room", "prefill_data_parallel_rank")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    room: int
    prefill_data_parallel_rank: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., room: _Optional[int] = ..., prefill_data_parallel_rank: _Optional[int] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared", "data_parallel_rank")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    stored: KvStored
    removed: KvRemoved
    cleared: KvCleared
    data_parallel_rank: int
    def __init__(self, stored: _Optional[_Union[KvStored, _Mapping]] = ..., removed: _Optional[_Union[KvRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvCleared, _Mapping]] = ..., data_parallel_rank: _Optional[int] = ...) -> None: ...

class KvStored(_message.Message):
    __slots__ = ("block_hashes", "parent_hash", "tier")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    parent_hash: int
    tier: KvTier
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ..., parent_hash: _Optional[int] = ..., tier: _Optional[_Union[KvTier, str]] = ...) -> None: ...

class KvRemoved(_message.Message):
    __slots__ = ("block_hashes", "tier")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    tier: KvTier
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ..., tier: _Optional[_Union[KvTier, str]] = ...) -> None: ...

class KvCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
