from kvmesh.api.types.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MediaKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_KIND_UNSPECIFIED: _ClassVar[MediaKind]
    MEDIA_KIND_IMAGE: _ClassVar[MediaKind]
    MEDIA_KIND_AUDIO: _ClassVar[MediaKind]
    MEDIA_KIND_VIDEO: _ClassVar[MediaKind]
MEDIA_KIND_UNSPECIFIED: MediaKind
MEDIA_KIND_IMAGE: MediaKind
MEDIA_KIND_AUDIO: MediaKind
MEDIA_KIND_VIDEO: MediaKind

class Generation(_message.Message):
    __slots__ = ("model", "token_ids", "emitted_token_ids", "sampling", "adapter", "cache_salt", "priority", "media", "traceparent", "data_parallel_rank")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: bytes
    emitted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    adapter: str
    cache_salt: str
    priority: int
    media: _containers.RepeatedCompositeFieldContainer[Media]
    traceparent: str
    data_parallel_rank: int
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., emitted_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., media: _Optional[_Iterable[_Union[Media, _Mapping]]] = ..., traceparent: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ...) -> None: ...

class Media(_message.Message):
    __slots__ = ("kind", "content_hash", "data", "url", "encoder_handle", "position", "length")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    ENCODER_HANDLE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    kind: MediaKind
    content_hash: bytes
    data: bytes
    url: str
    encoder_handle: bytes
    position: int
    length: int
    def __init__(self, kind: _Optional[_Union[MediaKind, str]] = ..., content_hash: _Optional[bytes] = ..., data: _Optional[bytes] = ..., url: _Optional[str] = ..., encoder_handle: _Optional[bytes] = ..., position: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...
