import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_KIND_UNSPECIFIED: _ClassVar[ErrorKind]
    ERROR_KIND_INVALID: _ClassVar[ErrorKind]
    ERROR_KIND_NOT_FOUND: _ClassVar[ErrorKind]
    ERROR_KIND_UNAUTHENTICATED: _ClassVar[ErrorKind]
    ERROR_KIND_PERMISSION_DENIED: _ClassVar[ErrorKind]
    ERROR_KIND_UNSUPPORTED: _ClassVar[ErrorKind]
    ERROR_KIND_OVERLOADED: _ClassVar[ErrorKind]
    ERROR_KIND_UNAVAILABLE: _ClassVar[ErrorKind]
    ERROR_KIND_LOST: _ClassVar[ErrorKind]
    ERROR_KIND_KV_LOST: _ClassVar[ErrorKind]
    ERROR_KIND_DEADLINE: _ClassVar[ErrorKind]
    ERROR_KIND_CANCELLED: _ClassVar[ErrorKind]
    ERROR_KIND_INTERNAL: _ClassVar[ErrorKind]
ERROR_KIND_UNSPECIFIED: ErrorKind
ERROR_KIND_INVALID: ErrorKind
ERROR_KIND_NOT_FOUND: ErrorKind
ERROR_KIND_UNAUTHENTICATED: ErrorKind
ERROR_KIND_PERMISSION_DENIED: ErrorKind
ERROR_KIND_UNSUPPORTED: ErrorKind
ERROR_KIND_OVERLOADED: ErrorKind
ERROR_KIND_UNAVAILABLE: ErrorKind
ERROR_KIND_LOST: ErrorKind
ERROR_KIND_KV_LOST: ErrorKind
ERROR_KIND_DEADLINE: ErrorKind
ERROR_KIND_CANCELLED: ErrorKind
ERROR_KIND_INTERNAL: ErrorKind

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "reason", "message", "field", "retry_after", "request_id", "where")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    kind: ErrorKind
    reason: str
    message: str
    field: str
    retry_after: _duration_pb2.Duration
    request_id: str
    where: str
    def __init__(self, kind: _Optional[_Union[ErrorKind, str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ..., where: _Optional[str] = ...) -> None: ...
