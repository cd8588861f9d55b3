import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadRecord(_message.Message):
    __slots__ = ("worker_id", "epoch", "sequence", "taken_at", "step", "running_requests", "waiting_requests", "waiting_prompt_tokens", "kv_blocks_used", "kv_blocks_free", "kv_blocks_total", "kv_blocks_leased", "running_requests_max", "step_s", "prompt_tokens_total", "output_tokens_total", "cached_tokens_total", "transferred_tokens_total", "data_parallel_rank", "is_draining", "preempted_requests_total", "failing_kv_paths", "failed_handoffs_total", "recomputed_tokens_total", "bootstrapping_requests", "sending_requests", "preallocating_requests", "receiving_requests", "retracted_requests", "pulling_requests", "kv_blocks_cached", "kv_blocks_held", "kv_blocks_unaccounted")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_AT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_LEASED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_MAX_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FAILING_KV_PATHS_FIELD_NUMBER: _ClassVar[int]
    FAILED_HANDOFFS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAPPING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SENDING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREALLOCATING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PULLING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_UNACCOUNTED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    sequence: int
    taken_at: _timestamp_pb2.Timestamp
    step: int
    running_requests: int
    waiting_requests: int
    waiting_prompt_tokens: int
    kv_blocks_used: int
    kv_blocks_free: int
    kv_blocks_total: int
    kv_blocks_leased: int
    running_requests_max: int
    step_s: float
    prompt_tokens_total: int
    output_tokens_total: int
    cached_tokens_total: int
    transferred_tokens_total: int
    data_parallel_rank: int
    is_draining: bool
    preempted_requests_total: int
    failing_kv_paths: _containers.RepeatedCompositeFieldContainer[FailingKvPath]
    failed_handoffs_total: int
    recomputed_tokens_total: int
    bootstrapping_requests: int
    sending_requests: int
    preallocating_requests: int
    receiving_requests: int
    retracted_requests: int
    pulling_requests: int
    kv_blocks_cached: int
    kv_blocks_held: int
    kv_blocks_unaccounted: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., taken_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., step: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., waiting_prompt_tokens: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_leased: _Optional[int] = ..., running_requests_max: _Optional[int] = ..., step_s: _Optional[float] = ..., prompt_tokens_total: _Optional[int] = ..., output_tokens_total: _Optional[int] = ..., cached_tokens_total: _Optional[int] = ..., transferred_tokens_total: _Optional[int] = ..., data_parallel_rank: _Optional[int] = ..., is_draining: _Optional[bool] = ..., preempted_requests_total: _Optional[int] = ..., failing_kv_paths: _Optional[_Iterable[_Union[FailingKvPath, _Mapping]]] = ..., failed_handoffs_total: _Optional[int] = ..., recomputed_tokens_total: _Optional[int] = ..., bootstrapping_requests: _Optional[int] = ..., sending_requests: _Optional[int] = ..., preallocating_requests: _Optional[int] = ..., receiving_requests: _Optional[int] = ..., retracted_requests: _Optional[int] = ..., pulling_requests: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., kv_blocks_held: _Optional[int] = ..., kv_blocks_unaccounted: _Optional[int] = ...) -> None: ...

class FailingKvPath(_message.Message):
    __slots__ = ("worker_id", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
