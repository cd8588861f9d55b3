import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvmesh.api.types.v1 import model_pb2 as _model_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlannerMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLANNER_MODE_UNSPECIFIED: _ClassVar[PlannerMode]
    PLANNER_MODE_OBSERVE: _ClassVar[PlannerMode]
    PLANNER_MODE_DRY_RUN: _ClassVar[PlannerMode]
    PLANNER_MODE_ACT: _ClassVar[PlannerMode]
PLANNER_MODE_UNSPECIFIED: PlannerMode
PLANNER_MODE_OBSERVE: PlannerMode
PLANNER_MODE_DRY_RUN: PlannerMode
PLANNER_MODE_ACT: PlannerMode

class GetPlanRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("mode", "observed_at", "source", "pools", "latencies", "problems")
    MODE_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_AT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    mode: PlannerMode
    observed_at: _timestamp_pb2.Timestamp
    source: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolView]
    latencies: _containers.RepeatedCompositeFieldContainer[LatencyView]
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, mode: _Optional[_Union[PlannerMode, str]] = ..., observed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., source: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolView, _Mapping]]] = ..., latencies: _Optional[_Iterable[_Union[LatencyView, _Mapping]]] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class PoolView(_message.Message):
    __slots__ = ("model", "role", "workers_ready", "workers_draining", "workers_critical", "workers_planned", "running_requests", "waiting_requests", "kv_usage", "prompt_tokens_per_s", "output_tokens_per_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_READY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_CRITICAL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_PLANNED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _model_pb2.Role
    workers_ready: int
    workers_draining: int
    workers_critical: int
    workers_planned: int
    running_requests: int
    waiting_requests: int
    kv_usage: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_model_pb2.Role, str]] = ..., workers_ready: _Optional[int] = ..., workers_draining: _Optional[int] = ..., workers_critical: _Optional[int] = ..., workers_planned: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., kv_usage: _Optional[float] = ..., prompt_tokens_per_s: _Optional[float] = ..., output_tokens_per_s: _Optional[float] = ...) -> None: ...

class LatencyView(_message.Message):
    __slots__ = ("model", "requests_per_s", "ttft_mean", "ttft_p99", "itl_mean", "itl_p99", "prompt_tokens_mean", "output_tokens_mean")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_MEAN_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_FIELD_NUMBER: _ClassVar[int]
    ITL_MEAN_FIELD_NUMBER: _ClassVar[int]
    ITL_P99_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_MEAN_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_MEAN_FIELD_NUMBER: _ClassVar[int]
    model: str
    requests_per_s: float
    ttft_mean: _duration_pb2.Duration
    ttft_p99: _duration_pb2.Duration
    itl_mean: _duration_pb2.Duration
    itl_p99: _duration_pb2.Duration
    prompt_tokens_mean: float
    output_tokens_mean: float
    def __init__(self, model: _Optional[str] = ..., requests_per_s: _Optional[float] = ..., ttft_mean: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ttft_p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., itl_mean: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., itl_p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_tokens_mean: _Optional[float] = ..., output_tokens_mean: _Optional[float] = ...) -> None: ...

class Targets(_message.Message):
    __slots__ = ("model", "ttft", "itl", "workers_min", "workers_max")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    ITL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_MIN_FIELD_NUMBER: _ClassVar[int]
    WORKERS_MAX_FIELD_NUMBER: _ClassVar[int]
    model: str
    ttft: _duration_pb2.Duration
    itl: _duration_pb2.Duration
    workers_min: int
    workers_max: int
    def __init__(self, model: _Optional[str] = ..., ttft: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., itl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., workers_min: _Optional[int] = ..., workers_max: _Optional[int] = ...) -> None: ...

class SetTargetsRequest(_message.Message):
    __slots__ = ("targets",)
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    targets: Targets
    def __init__(self, targets: _Optional[_Union[Targets, _Mapping]] = ...) -> None: ...

class SetTargetsResponse(_message.Message):
    __slots__ = ("targets",)
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    targets: Targets
    def __init__(self, targets: _Optional[_Union[Targets, _Mapping]] = ...) -> None: ...

class SimulateRequest(_message.Message):
    __slots__ = ("model", "requests_per_s", "prompt_tokens", "output_tokens", "targets")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    model: str
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    targets: Targets
    def __init__(self, model: _Optional[str] = ..., requests_per_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., targets: _Optional[_Union[Targets, _Mapping]] = ...) -> None: ...

class SimulateResponse(_message.Message):
    __slots__ = ("pools", "latency")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolView]
    latency: LatencyView
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolView, _Mapping]]] = ..., latency: _Optional[_Union[LatencyView, _Mapping]] = ...) -> None: ...
