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

class ObservationState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OBSERVATION_STATE_UNSPECIFIED: _ClassVar[ObservationState]
    OBSERVATION_STATE_COMPLETE: _ClassVar[ObservationState]
    OBSERVATION_STATE_MISSING: _ClassVar[ObservationState]
    OBSERVATION_STATE_STALE: _ClassVar[ObservationState]
    OBSERVATION_STATE_CONTRADICTORY: _ClassVar[ObservationState]

class DecisionAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_ACTION_UNSPECIFIED: _ClassVar[DecisionAction]
    DECISION_ACTION_KEEP: _ClassVar[DecisionAction]
    DECISION_ACTION_HOLD: _ClassVar[DecisionAction]
    DECISION_ACTION_DEFLECT: _ClassVar[DecisionAction]
    DECISION_ACTION_FLIP: _ClassVar[DecisionAction]
    DECISION_ACTION_SCALE: _ClassVar[DecisionAction]

class DecisionOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_OUTCOME_UNSPECIFIED: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_NONE: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_PROPOSED: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_ACCEPTED: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_FAILED: _ClassVar[DecisionOutcome]
PLANNER_MODE_UNSPECIFIED: PlannerMode
PLANNER_MODE_OBSERVE: PlannerMode
PLANNER_MODE_DRY_RUN: PlannerMode
PLANNER_MODE_ACT: PlannerMode
OBSERVATION_STATE_UNSPECIFIED: ObservationState
OBSERVATION_STATE_COMPLETE: ObservationState
OBSERVATION_STATE_MISSING: ObservationState
OBSERVATION_STATE_STALE: ObservationState
OBSERVATION_STATE_CONTRADICTORY: ObservationState
DECISION_ACTION_UNSPECIFIED: DecisionAction
DECISION_ACTION_KEEP: DecisionAction
DECISION_ACTION_HOLD: DecisionAction
DECISION_ACTION_DEFLECT: DecisionAction
DECISION_ACTION_FLIP: DecisionAction
DECISION_ACTION_SCALE: DecisionAction
DECISION_OUTCOME_UNSPECIFIED: DecisionOutcome
DECISION_OUTCOME_NONE: DecisionOutcome
DECISION_OUTCOME_PROPOSED: DecisionOutcome
DECISION_OUTCOME_ACCEPTED: DecisionOutcome
DECISION_OUTCOME_FAILED: DecisionOutcome

class GetPlanRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class WatchPlansRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class WatchPlansResponse(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("mode", "observed_at", "source", "pools", "latencies", "problems", "targets", "decisions", "is_leader", "leader_id")
    MODE_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_AT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    IS_LEADER_FIELD_NUMBER: _ClassVar[int]
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    mode: PlannerMode
    observed_at: _timestamp_pb2.Timestamp
    source: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolView]
    latencies: _containers.RepeatedCompositeFieldContainer[LatencyView]
    problems: _containers.RepeatedScalarFieldContainer[str]
    targets: _containers.RepeatedCompositeFieldContainer[Targets]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    is_leader: bool
    leader_id: str
    def __init__(self, mode: _Optional[_Union[PlannerMode, str]] = ..., observed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., source: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolView, _Mapping]]] = ..., latencies: _Optional[_Iterable[_Union[LatencyView, _Mapping]]] = ..., problems: _Optional[_Iterable[str]] = ..., targets: _Optional[_Iterable[_Union[Targets, _Mapping]]] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., is_leader: _Optional[bool] = ..., leader_id: _Optional[str] = ...) -> None: ...

class PoolView(_message.Message):
    __slots__ = ("model", "role", "workers_ready", "workers_draining", "workers_critical", "workers_planned", "running_requests", "waiting_requests", "kv_usage", "prompt_tokens_per_s", "output_tokens_per_s", "waiting_prompt_tokens")
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
    WAITING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
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
    waiting_prompt_tokens: float
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_model_pb2.Role, str]] = ..., workers_ready: _Optional[int] = ..., workers_draining: _Optional[int] = ..., workers_critical: _Optional[int] = ..., workers_planned: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., kv_usage: _Optional[float] = ..., prompt_tokens_per_s: _Optional[float] = ..., output_tokens_per_s: _Optional[float] = ..., waiting_prompt_tokens: _Optional[float] = ...) -> None: ...

class LatencyView(_message.Message):
    __slots__ = ("model", "requests_per_s", "ttft_mean", "ttft_p99", "itl_mean", "itl_p99", "prompt_tokens_mean", "output_tokens_mean", "hit_rate", "queue_wait_mean", "queued_requests", "failed_rate", "state")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_MEAN_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_FIELD_NUMBER: _ClassVar[int]
    ITL_MEAN_FIELD_NUMBER: _ClassVar[int]
    ITL_P99_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_MEAN_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_MEAN_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_MEAN_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_RATE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    model: str
    requests_per_s: float
    ttft_mean: _duration_pb2.Duration
    ttft_p99: _duration_pb2.Duration
    itl_mean: _duration_pb2.Duration
    itl_p99: _duration_pb2.Duration
    prompt_tokens_mean: float
    output_tokens_mean: float
    hit_rate: float
    queue_wait_mean: _duration_pb2.Duration
    queued_requests: float
    failed_rate: float
    state: ObservationState
    def __init__(self, model: _Optional[str] = ..., requests_per_s: _Optional[float] = ..., ttft_mean: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ttft_p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., itl_mean: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., itl_p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_tokens_mean: _Optional[float] = ..., output_tokens_mean: _Optional[float] = ..., hit_rate: _Optional[float] = ..., queue_wait_mean: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., queued_requests: _Optional[float] = ..., failed_rate: _Optional[float] = ..., state: _Optional[_Union[ObservationState, str]] = ...) -> None: ...

class PoolLimits(_message.Message):
    __slots__ = ("workers_min", "workers_max", "cost_per_worker")
    WORKERS_MIN_FIELD_NUMBER: _ClassVar[int]
    WORKERS_MAX_FIELD_NUMBER: _ClassVar[int]
    COST_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    workers_min: int
    workers_max: int
    cost_per_worker: float
    def __init__(self, workers_min: _Optional[int] = ..., workers_max: _Optional[int] = ..., cost_per_worker: _Optional[float] = ...) -> None: ...

class Targets(_message.Message):
    __slots__ = ("model", "ttft", "itl", "percentile", "prefill", "decode", "cost_max")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    ITL_FIELD_NUMBER: _ClassVar[int]
    PERCENTILE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    COST_MAX_FIELD_NUMBER: _ClassVar[int]
    model: str
    ttft: _duration_pb2.Duration
    itl: _duration_pb2.Duration
    percentile: float
    prefill: PoolLimits
    decode: PoolLimits
    cost_max: float
    def __init__(self, model: _Optional[str] = ..., ttft: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., itl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., percentile: _Optional[float] = ..., prefill: _Optional[_Union[PoolLimits, _Mapping]] = ..., decode: _Optional[_Union[PoolLimits, _Mapping]] = ..., cost_max: _Optional[float] = ...) -> None: ...

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

class Shape(_message.Message):
    __slots__ = ("prefill_workers", "decode_workers", "deflect_tokens")
    PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DEFLECT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_workers: int
    decode_workers: int
    deflect_tokens: int
    def __init__(self, prefill_workers: _Optional[int] = ..., decode_workers: _Optional[int] = ..., deflect_tokens: _Optional[int] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("action", "shape", "takes", "goodput_per_s", "attainment", "cost", "ttft", "itl", "limit")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_PER_S_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    ITL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    action: DecisionAction
    shape: Shape
    takes: _duration_pb2.Duration
    goodput_per_s: float
    attainment: float
    cost: float
    ttft: _duration_pb2.Duration
    itl: _duration_pb2.Duration
    limit: str
    def __init__(self, action: _Optional[_Union[DecisionAction, str]] = ..., shape: _Optional[_Union[Shape, _Mapping]] = ..., takes: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., goodput_per_s: _Optional[float] = ..., attainment: _Optional[float] = ..., cost: _Optional[float] = ..., ttft: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., itl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., limit: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("requests_per_s", "prompt_tokens", "output_tokens", "hit_rate")
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    hit_rate: float
    def __init__(self, requests_per_s: _Optional[float] = ..., prompt_tokens: _Optional[float] = ..., output_tokens: _Optional[float] = ..., hit_rate: _Optional[float] = ...) -> None: ...

class DecisionInputs(_message.Message):
    __slots__ = ("state", "observed", "predicted", "predictor", "predictor_error", "ready", "wanted", "ttft_correction", "itl_correction")
    STATE_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTOR_FIELD_NUMBER: _ClassVar[int]
    PREDICTOR_ERROR_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    TTFT_CORRECTION_FIELD_NUMBER: _ClassVar[int]
    ITL_CORRECTION_FIELD_NUMBER: _ClassVar[int]
    state: ObservationState
    observed: Load
    predicted: Load
    predictor: str
    predictor_error: float
    ready: Shape
    wanted: Shape
    ttft_correction: float
    itl_correction: float
    def __init__(self, state: _Optional[_Union[ObservationState, str]] = ..., observed: _Optional[_Union[Load, _Mapping]] = ..., predicted: _Optional[_Union[Load, _Mapping]] = ..., predictor: _Optional[str] = ..., predictor_error: _Optional[float] = ..., ready: _Optional[_Union[Shape, _Mapping]] = ..., wanted: _Optional[_Union[Shape, _Mapping]] = ..., ttft_correction: _Optional[float] = ..., itl_correction: _Optional[float] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("number", "model", "decided_at", "action", "reason", "detail", "inputs", "alternatives", "outcome", "outcome_detail", "fencing_token")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_DETAIL_FIELD_NUMBER: _ClassVar[int]
    FENCING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    number: int
    model: str
    decided_at: _timestamp_pb2.Timestamp
    action: DecisionAction
    reason: str
    detail: str
    inputs: DecisionInputs
    alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    outcome: DecisionOutcome
    outcome_detail: str
    fencing_token: int
    def __init__(self, number: _Optional[int] = ..., model: _Optional[str] = ..., decided_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., action: _Optional[_Union[DecisionAction, str]] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., inputs: _Optional[_Union[DecisionInputs, _Mapping]] = ..., alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., outcome: _Optional[_Union[DecisionOutcome, str]] = ..., outcome_detail: _Optional[str] = ..., fencing_token: _Optional[int] = ...) -> None: ...

class SteadyLoad(_message.Message):
    __slots__ = ("requests_per_s", "prompt_tokens", "output_tokens", "duration", "prompt_variation", "output_variation")
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_VARIATION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_VARIATION_FIELD_NUMBER: _ClassVar[int]
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    duration: _duration_pb2.Duration
    prompt_variation: float
    output_variation: float
    def __init__(self, requests_per_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_variation: _Optional[float] = ..., output_variation: _Optional[float] = ...) -> None: ...

class RecordedRequest(_message.Message):
    __slots__ = ("at", "prompt_tokens", "output_tokens", "block_ids")
    AT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    at: _duration_pb2.Duration
    prompt_tokens: int
    output_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, at: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RecordedLoad(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RecordedRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[RecordedRequest, _Mapping]]] = ...) -> None: ...

class SimulateRequest(_message.Message):
    __slots__ = ("model", "steady", "recorded", "targets", "prefill_workers", "decode_workers", "has_planner", "profile")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STEADY_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    HAS_PLANNER_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    model: str
    steady: SteadyLoad
    recorded: RecordedLoad
    targets: Targets
    prefill_workers: int
    decode_workers: int
    has_planner: bool
    profile: _model_pb2.PerformanceProfile
    def __init__(self, model: _Optional[str] = ..., steady: _Optional[_Union[SteadyLoad, _Mapping]] = ..., recorded: _Optional[_Union[RecordedLoad, _Mapping]] = ..., targets: _Optional[_Union[Targets, _Mapping]] = ..., prefill_workers: _Optional[int] = ..., decode_workers: _Optional[int] = ..., has_planner: _Optional[bool] = ..., profile: _Optional[_Union[_model_pb2.PerformanceProfile, _Mapping]] = ...) -> None: ...

class SimulateResponse(_message.Message):
    __slots__ = ("shape", "requests", "attainment", "goodput_per_s", "ttft_p50", "ttft_p95", "ttft_p99", "itl_p50", "itl_p95", "itl_p99", "hit_rate", "worker_hours", "cost", "expected")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_P50_FIELD_NUMBER: _ClassVar[int]
    TTFT_P95_FIELD_NUMBER: _ClassVar[int]
    TTFT_P99_FIELD_NUMBER: _ClassVar[int]
    ITL_P50_FIELD_NUMBER: _ClassVar[int]
    ITL_P95_FIELD_NUMBER: _ClassVar[int]
    ITL_P99_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    WORKER_HOURS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    shape: Shape
    requests: int
    attainment: float
    goodput_per_s: float
    ttft_p50: _duration_pb2.Duration
    ttft_p95: _duration_pb2.Duration
    ttft_p99: _duration_pb2.Duration
    itl_p50: _duration_pb2.Duration
    itl_p95: _duration_pb2.Duration
    itl_p99: _duration_pb2.Duration
    hit_rate: float
    worker_hours: float
    cost: float
    expected: Alternative
    def __init__(self, shape: _Optional[_Union[Shape, _Mapping]] = ..., requests: _Optional[int] = ..., attainment: _Optional[float] = ..., goodput_per_s: _Optional[float] = ..., ttft_p50: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ttft_p95: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ttft_p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., itl_p50: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., itl_p95: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., itl_p99: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., hit_rate: _Optional[float] = ..., worker_hours: _Optional[float] = ..., cost: _Optional[float] = ..., expected: _Optional[_Union[Alternative, _Mapping]] = ...) -> None: ...
