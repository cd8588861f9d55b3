from kvmesh.api.types.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_ENCODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_ENCODE: Role

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "address", "data_parallel_rank", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    data_parallel_rank: int
    epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("name", "source", "revision", "context_tokens_max", "vocabulary_size", "eos_token_ids", "adapters", "files_digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    FILES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    revision: str
    context_tokens_max: int
    vocabulary_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    files_digest: str
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., revision: _Optional[str] = ..., context_tokens_max: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Iterable[str]] = ..., files_digest: _Optional[str] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("engine", "engine_version", "handoffs", "roles", "features", "logprobs_max", "data_parallel_size")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MAX_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    engine: str
    engine_version: str
    handoffs: _containers.RepeatedScalarFieldContainer[_kv_pb2.Handoff]
    roles: _containers.RepeatedScalarFieldContainer[Role]
    features: _containers.RepeatedScalarFieldContainer[str]
    logprobs_max: int
    data_parallel_size: int
    def __init__(self, engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., handoffs: _Optional[_Iterable[_Union[_kv_pb2.Handoff, str]]] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., features: _Optional[_Iterable[str]] = ..., logprobs_max: _Optional[int] = ..., data_parallel_size: _Optional[int] = ...) -> None: ...

class PerformanceProfile(_message.Message):
    __slots__ = ("prefill_base_s", "prefill_s_per_token", "prefill_s_per_token_pair", "decode_step_base_s", "decode_s_per_request", "decode_s_per_kv_token", "kv_bytes_per_token", "transfer_bytes_per_s", "itl_target_s")
    PREFILL_BASE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_PER_TOKEN_PAIR_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_BASE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_PER_KV_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ITL_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    prefill_base_s: float
    prefill_s_per_token: float
    prefill_s_per_token_pair: float
    decode_step_base_s: float
    decode_s_per_request: float
    decode_s_per_kv_token: float
    kv_bytes_per_token: int
    transfer_bytes_per_s: float
    itl_target_s: float
    def __init__(self, prefill_base_s: _Optional[float] = ..., prefill_s_per_token: _Optional[float] = ..., prefill_s_per_token_pair: _Optional[float] = ..., decode_step_base_s: _Optional[float] = ..., decode_s_per_request: _Optional[float] = ..., decode_s_per_kv_token: _Optional[float] = ..., kv_bytes_per_token: _Optional[int] = ..., transfer_bytes_per_s: _Optional[float] = ..., itl_target_s: _Optional[float] = ...) -> None: ...
