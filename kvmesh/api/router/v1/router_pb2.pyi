import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvmesh.api.errors.v1 import errors_pb2 as _errors_pb2
from kvmesh.api.types.v1 import kv_pb2 as _kv_pb2
from kvmesh.api.types.v1 import load_pb2 as _load_pb2
from kvmesh.api.types.v1 import model_pb2 as _model_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReportKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPORT_KIND_UNSPECIFIED: _ClassVar[ReportKind]
    REPORT_KIND_PREFILLED: _ClassVar[ReportKind]
    REPORT_KIND_FIRST_TOKEN: _ClassVar[ReportKind]
    REPORT_KIND_PROGRESS: _ClassVar[ReportKind]
    REPORT_KIND_FINISHED: _ClassVar[ReportKind]
    REPORT_KIND_FAILED: _ClassVar[ReportKind]
    REPORT_KIND_CANCELLED: _ClassVar[ReportKind]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_QUEUED: _ClassVar[RequestState]
    REQUEST_STATE_PREFILLING: _ClassVar[RequestState]
    REQUEST_STATE_TRANSFERRING: _ClassVar[RequestState]
    REQUEST_STATE_DECODING: _ClassVar[RequestState]
    REQUEST_STATE_FINISHED: _ClassVar[RequestState]
    REQUEST_STATE_FAILED: _ClassVar[RequestState]
    REQUEST_STATE_CANCELLED: _ClassVar[RequestState]
    REQUEST_STATE_REFUSED: _ClassVar[RequestState]
    REQUEST_STATE_UNKNOWN: _ClassVar[RequestState]

class IndexTrust(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDEX_TRUST_UNSPECIFIED: _ClassVar[IndexTrust]
    INDEX_TRUST_EXACT: _ClassVar[IndexTrust]
    INDEX_TRUST_RECOVERING: _ClassVar[IndexTrust]
    INDEX_TRUST_APPROXIMATE: _ClassVar[IndexTrust]

class CoefficientSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COEFFICIENT_SOURCE_UNSPECIFIED: _ClassVar[CoefficientSource]
    COEFFICIENT_SOURCE_DEFAULT: _ClassVar[CoefficientSource]
    COEFFICIENT_SOURCE_PROFILE: _ClassVar[CoefficientSource]
    COEFFICIENT_SOURCE_LEARNED: _ClassVar[CoefficientSource]

class BreakerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BREAKER_STATE_UNSPECIFIED: _ClassVar[BreakerState]
    BREAKER_STATE_CLOSED: _ClassVar[BreakerState]
    BREAKER_STATE_OPEN: _ClassVar[BreakerState]
    BREAKER_STATE_HALF_OPEN: _ClassVar[BreakerState]
REPORT_KIND_UNSPECIFIED: ReportKind
REPORT_KIND_PREFILLED: ReportKind
REPORT_KIND_FIRST_TOKEN: ReportKind
REPORT_KIND_PROGRESS: ReportKind
REPORT_KIND_FINISHED: ReportKind
REPORT_KIND_FAILED: ReportKind
REPORT_KIND_CANCELLED: ReportKind
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_QUEUED: RequestState
REQUEST_STATE_PREFILLING: RequestState
REQUEST_STATE_TRANSFERRING: RequestState
REQUEST_STATE_DECODING: RequestState
REQUEST_STATE_FINISHED: RequestState
REQUEST_STATE_FAILED: RequestState
REQUEST_STATE_CANCELLED: RequestState
REQUEST_STATE_REFUSED: RequestState
REQUEST_STATE_UNKNOWN: RequestState
INDEX_TRUST_UNSPECIFIED: IndexTrust
INDEX_TRUST_EXACT: IndexTrust
INDEX_TRUST_RECOVERING: IndexTrust
INDEX_TRUST_APPROXIMATE: IndexTrust
COEFFICIENT_SOURCE_UNSPECIFIED: CoefficientSource
COEFFICIENT_SOURCE_DEFAULT: CoefficientSource
COEFFICIENT_SOURCE_PROFILE: CoefficientSource
COEFFICIENT_SOURCE_LEARNED: CoefficientSource
BREAKER_STATE_UNSPECIFIED: BreakerState
BREAKER_STATE_CLOSED: BreakerState
BREAKER_STATE_OPEN: BreakerState
BREAKER_STATE_HALF_OPEN: BreakerState

class RouteRequest(_message.Message):
    __slots__ = ("hello", "reports", "asks")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    asks: _containers.RepeatedCompositeFieldContainer[Ask]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ..., asks: _Optional[_Iterable[_Union[Ask, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("frontend_id",)
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    frontend_id: str
    def __init__(self, frontend_id: _Optional[str] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("ask_id", "request_id", "model", "prompt_tokens", "expected_output_tokens", "block_hashes", "block_size_tokens", "adapter", "tenant", "priority", "timeout", "session_id", "choices", "required_features", "required_labels", "preferred_labels", "excluded_worker_ids", "pinned_prefill_worker_id", "pinned_decode_worker_id", "attempt", "traceparent", "files_digest")
    class RequiredLabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class PreferredLabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ASK_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_LABELS_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_LABELS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    PINNED_PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FILES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ask_id: int
    request_id: str
    model: str
    prompt_tokens: int
    expected_output_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    block_size_tokens: int
    adapter: str
    tenant: str
    priority: int
    timeout: _duration_pb2.Duration
    session_id: str
    choices: int
    required_features: _containers.RepeatedScalarFieldContainer[str]
    required_labels: _containers.ScalarMap[str, str]
    preferred_labels: _containers.ScalarMap[str, str]
    excluded_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    pinned_prefill_worker_id: str
    pinned_decode_worker_id: str
    attempt: int
    traceparent: str
    files_digest: str
    def __init__(self, ask_id: _Optional[int] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., expected_output_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ..., block_size_tokens: _Optional[int] = ..., adapter: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., session_id: _Optional[str] = ..., choices: _Optional[int] = ..., required_features: _Optional[_Iterable[str]] = ..., required_labels: _Optional[_Mapping[str, str]] = ..., preferred_labels: _Optional[_Mapping[str, str]] = ..., excluded_worker_ids: _Optional[_Iterable[str]] = ..., pinned_prefill_worker_id: _Optional[str] = ..., pinned_decode_worker_id: _Optional[str] = ..., attempt: _Optional[int] = ..., traceparent: _Optional[str] = ..., files_digest: _Optional[str] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("placements", "refusals", "queued_ask_ids")
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ASK_IDS_FIELD_NUMBER: _ClassVar[int]
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    queued_ask_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., queued_ask_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("ask_id", "reservation_id", "prefill", "decode", "handoff", "rendezvous_address", "cached_tokens", "expected_ttft", "reasons", "queued", "decode_cached_tokens")
    ASK_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TTFT_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    DECODE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ask_id: int
    reservation_id: str
    prefill: _model_pb2.WorkerRef
    decode: _model_pb2.WorkerRef
    handoff: _kv_pb2.Handoff
    rendezvous_address: str
    cached_tokens: int
    expected_ttft: _duration_pb2.Duration
    reasons: _containers.RepeatedScalarFieldContainer[str]
    queued: _duration_pb2.Duration
    decode_cached_tokens: int
    def __init__(self, ask_id: _Optional[int] = ..., reservation_id: _Optional[str] = ..., prefill: _Optional[_Union[_model_pb2.WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[_model_pb2.WorkerRef, _Mapping]] = ..., handoff: _Optional[_Union[_kv_pb2.Handoff, str]] = ..., rendezvous_address: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., expected_ttft: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reasons: _Optional[_Iterable[str]] = ..., queued: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode_cached_tokens: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("ask_id", "error")
    ASK_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ask_id: int
    error: _errors_pb2.ErrorDetail
    def __init__(self, ask_id: _Optional[int] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("ask_id", "kind", "elapsed", "cached_tokens", "output_tokens", "error", "failed_worker_id", "reservation_id", "is_answered_by_prefill", "was_recomputed")
    ASK_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FAILED_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    IS_ANSWERED_BY_PREFILL_FIELD_NUMBER: _ClassVar[int]
    WAS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    ask_id: int
    kind: ReportKind
    elapsed: _duration_pb2.Duration
    cached_tokens: int
    output_tokens: int
    error: _errors_pb2.ErrorDetail
    failed_worker_id: str
    reservation_id: str
    is_answered_by_prefill: bool
    was_recomputed: bool
    def __init__(self, ask_id: _Optional[int] = ..., kind: _Optional[_Union[ReportKind, str]] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., failed_worker_id: _Optional[str] = ..., reservation_id: _Optional[str] = ..., is_answered_by_prefill: _Optional[bool] = ..., was_recomputed: _Optional[bool] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "policy", "decided_at", "candidates", "placement", "error", "reports", "margin", "observed_ttft", "queued", "cost_unit", "attempt", "prompt_tokens", "earlier")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_TTFT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    COST_UNIT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    policy: str
    decided_at: _timestamp_pb2.Timestamp
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    placement: Placement
    error: _errors_pb2.ErrorDetail
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    margin: float
    observed_ttft: _duration_pb2.Duration
    queued: _duration_pb2.Duration
    cost_unit: str
    attempt: int
    prompt_tokens: int
    earlier: _containers.RepeatedCompositeFieldContainer[EarlierPlacement]
    def __init__(self, request_id: _Optional[str] = ..., policy: _Optional[str] = ..., decided_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ..., margin: _Optional[float] = ..., observed_ttft: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., queued: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cost_unit: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., earlier: _Optional[_Iterable[_Union[EarlierPlacement, _Mapping]]] = ...) -> None: ...

class EarlierPlacement(_message.Message):
    __slots__ = ("attempt", "decided_at", "placement", "error", "reports", "prompt_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    decided_at: _timestamp_pb2.Timestamp
    placement: Placement
    error: _errors_pb2.ErrorDetail
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    prompt_tokens: int
    def __init__(self, attempt: _Optional[int] = ..., decided_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., error: _Optional[_Union[_errors_pb2.ErrorDetail, _Mapping]] = ..., reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("prefill", "decode", "cost", "terms", "removed_by")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_BY_FIELD_NUMBER: _ClassVar[int]
    prefill: _model_pb2.WorkerRef
    decode: _model_pb2.WorkerRef
    cost: float
    terms: _containers.RepeatedCompositeFieldContainer[CostTerm]
    removed_by: str
    def __init__(self, prefill: _Optional[_Union[_model_pb2.WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[_model_pb2.WorkerRef, _Mapping]] = ..., cost: _Optional[float] = ..., terms: _Optional[_Iterable[_Union[CostTerm, _Mapping]]] = ..., removed_by: _Optional[str] = ...) -> None: ...

class CostTerm(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("model", "in_flight_only", "requests_max")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_ONLY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_MAX_FIELD_NUMBER: _ClassVar[int]
    model: str
    in_flight_only: bool
    requests_max: int
    def __init__(self, model: _Optional[str] = ..., in_flight_only: _Optional[bool] = ..., requests_max: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "requests_in_flight", "requests_queued")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_QUEUED_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestView]
    requests_in_flight: int
    requests_queued: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestView, _Mapping]]] = ..., requests_in_flight: _Optional[int] = ..., requests_queued: _Optional[int] = ...) -> None: ...

class RequestView(_message.Message):
    __slots__ = ("request_id", "model", "tenant", "state", "reason", "decided_at", "attempt", "prompt_tokens", "cached_tokens", "output_tokens", "prefill", "decode", "expected_ttft", "observed_ttft")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TTFT_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_TTFT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    tenant: str
    state: RequestState
    reason: str
    decided_at: _timestamp_pb2.Timestamp
    attempt: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill: _model_pb2.WorkerRef
    decode: _model_pb2.WorkerRef
    expected_ttft: _duration_pb2.Duration
    observed_ttft: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., reason: _Optional[str] = ..., decided_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempt: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., prefill: _Optional[_Union[_model_pb2.WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[_model_pb2.WorkerRef, _Mapping]] = ..., expected_ttft: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., observed_ttft: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ...) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("worker", "role", "model", "trust", "trust_reason", "load", "index_blocks", "requests_in_flight", "prompt_tokens_in_flight", "excluded_by", "kv_compatibility_hash", "coefficients", "breaker", "tiers", "paused_frontend_ids")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    TRUST_REASON_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    INDEX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_BY_FIELD_NUMBER: _ClassVar[int]
    KV_COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    COEFFICIENTS_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FRONTEND_IDS_FIELD_NUMBER: _ClassVar[int]
    worker: _model_pb2.WorkerRef
    role: _model_pb2.Role
    model: str
    trust: IndexTrust
    trust_reason: str
    load: _load_pb2.LoadRecord
    index_blocks: int
    requests_in_flight: int
    prompt_tokens_in_flight: int
    excluded_by: str
    kv_compatibility_hash: str
    coefficients: _containers.RepeatedCompositeFieldContainer[Coefficient]
    breaker: BreakerState
    tiers: _containers.RepeatedCompositeFieldContainer[TierBlocks]
    paused_frontend_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker: _Optional[_Union[_model_pb2.WorkerRef, _Mapping]] = ..., role: _Optional[_Union[_model_pb2.Role, str]] = ..., model: _Optional[str] = ..., trust: _Optional[_Union[IndexTrust, str]] = ..., trust_reason: _Optional[str] = ..., load: _Optional[_Union[_load_pb2.LoadRecord, _Mapping]] = ..., index_blocks: _Optional[int] = ..., requests_in_flight: _Optional[int] = ..., prompt_tokens_in_flight: _Optional[int] = ..., excluded_by: _Optional[str] = ..., kv_compatibility_hash: _Optional[str] = ..., coefficients: _Optional[_Iterable[_Union[Coefficient, _Mapping]]] = ..., breaker: _Optional[_Union[BreakerState, str]] = ..., tiers: _Optional[_Iterable[_Union[TierBlocks, _Mapping]]] = ..., paused_frontend_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Coefficient(_message.Message):
    __slots__ = ("name", "value", "source", "observations")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    source: CoefficientSource
    observations: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., source: _Optional[_Union[CoefficientSource, str]] = ..., observations: _Optional[int] = ...) -> None: ...

class TierBlocks(_message.Message):
    __slots__ = ("tier", "blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: _kv_pb2.KvTier
    blocks: int
    def __init__(self, tier: _Optional[_Union[_kv_pb2.KvTier, str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class SyncPeersRequest(_message.Message):
    __slots__ = ("update",)
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    update: PeerUpdate
    def __init__(self, update: _Optional[_Union[PeerUpdate, _Mapping]] = ...) -> None: ...

class SyncPeersResponse(_message.Message):
    __slots__ = ("update",)
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    update: PeerUpdate
    def __init__(self, update: _Optional[_Union[PeerUpdate, _Mapping]] = ...) -> None: ...

class PeerUpdate(_message.Message):
    __slots__ = ("router_id", "run_id", "sequence", "reservations", "prefilled_ids", "settled_ids", "is_snapshot", "is_complete")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_IDS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    run_id: str
    sequence: int
    reservations: _containers.RepeatedCompositeFieldContainer[Reservation]
    prefilled_ids: _containers.RepeatedScalarFieldContainer[str]
    settled_ids: _containers.RepeatedScalarFieldContainer[str]
    is_snapshot: bool
    is_complete: bool
    def __init__(self, router_id: _Optional[str] = ..., run_id: _Optional[str] = ..., sequence: _Optional[int] = ..., reservations: _Optional[_Iterable[_Union[Reservation, _Mapping]]] = ..., prefilled_ids: _Optional[_Iterable[str]] = ..., settled_ids: _Optional[_Iterable[str]] = ..., is_snapshot: _Optional[bool] = ..., is_complete: _Optional[bool] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("reservation_id", "prefill_worker_id", "decode_worker_id", "uncached_tokens", "kv_blocks", "is_prefilled", "frontend_id", "ask_id", "request_id", "choices", "ends_after", "prefill_rank", "decode_rank", "session_id", "block_hashes", "is_orphaned", "tenant", "model", "priority", "charged_tokens")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_PREFILLED_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    ASK_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    ENDS_AFTER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    IS_ORPHANED_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CHARGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    prefill_worker_id: str
    decode_worker_id: str
    uncached_tokens: int
    kv_blocks: int
    is_prefilled: bool
    frontend_id: str
    ask_id: int
    request_id: str
    choices: int
    ends_after: _duration_pb2.Duration
    prefill_rank: int
    decode_rank: int
    session_id: str
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    is_orphaned: bool
    tenant: str
    model: str
    priority: int
    charged_tokens: int
    def __init__(self, reservation_id: _Optional[str] = ..., prefill_worker_id: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., uncached_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., is_prefilled: _Optional[bool] = ..., frontend_id: _Optional[str] = ..., ask_id: _Optional[int] = ..., request_id: _Optional[str] = ..., choices: _Optional[int] = ..., ends_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill_rank: _Optional[int] = ..., decode_rank: _Optional[int] = ..., session_id: _Optional[str] = ..., block_hashes: _Optional[_Iterable[int]] = ..., is_orphaned: _Optional[bool] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., priority: _Optional[int] = ..., charged_tokens: _Optional[int] = ...) -> None: ...

class SetPlacementBoundsRequest(_message.Message):
    __slots__ = ("model", "deflect_tokens", "fencing_token", "ttft_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEFLECT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FENCING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    deflect_tokens: int
    fencing_token: int
    ttft_s: float
    def __init__(self, model: _Optional[str] = ..., deflect_tokens: _Optional[int] = ..., fencing_token: _Optional[int] = ..., ttft_s: _Optional[float] = ...) -> None: ...

class SetPlacementBoundsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecordRequestsRequest(_message.Message):
    __slots__ = ("salt",)
    SALT_FIELD_NUMBER: _ClassVar[int]
    salt: bytes
    def __init__(self, salt: _Optional[bytes] = ...) -> None: ...

class RecordRequestsResponse(_message.Message):
    __slots__ = ("requests", "lost_requests")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LOST_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[FinishedRequest]
    lost_requests: int
    def __init__(self, requests: _Optional[_Iterable[_Union[FinishedRequest, _Mapping]]] = ..., lost_requests: _Optional[int] = ...) -> None: ...

class FinishedRequest(_message.Message):
    __slots__ = ("arrived_at", "prompt_tokens", "output_tokens", "block_ids")
    ARRIVED_AT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    arrived_at: _timestamp_pb2.Timestamp
    prompt_tokens: int
    output_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, arrived_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...
