from collections.abc import AsyncIterator
from typing import Any

from tensorrt_llm.disaggregated_params import DisaggregatedParams

# Origin: executor/result.py, 005bc848893f575ec14b45d6b13139360d67c790.
class Logprob:
    logprob: float
    rank: int | None
    def __init__(self, logprob: float, rank: int | None = None) -> None: ...

# Origin: executor/result.py, 005bc848893f575ec14b45d6b13139360d67c790. `token_ids` and `logprobs` are cumulative. `finish_reason` is stop,
# length, timeout or cancelled; "not_finished" until then in 1.4.0rc1 (serve/openengine, 1.4.0rc1).
class CompletionOutput:
    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | list[float]
    prompt_logprobs: list[dict[int, Logprob]] | list[float]
    finish_reason: str | None
    stop_reason: int | str | None
    disaggregated_params: DisaggregatedParams | None
    @property
    def token_ids_diff(self) -> list[int]: ...

# Origin: executor/result.py: `GenerationResult` (abort, aborted, finished, iteration: file id 1063746606, 2026) and `cached_tokens`
# as in serve/openengine (1.4.0rc1). An abort after the final result does nothing: `abort_request` of executor/base_worker.py logs
# "is finished, cannot abort it".
class GenerationResult:
    @property
    def request_id(self) -> int: ...
    @property
    def outputs(self) -> list[CompletionOutput]: ...
    @property
    def finished(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    cached_tokens: int
    def abort(self) -> None: ...
    def aborted(self) -> bool: ...
    def __aiter__(self) -> AsyncIterator[GenerationResult]: ...

# Origin: executor/result.py: what `get_stats_async` and `get_kv_cache_events_async` return; iterates until nothing came for the timeout.
class IterationResult:
    def __aiter__(self) -> AsyncIterator[dict[str, Any]]: ...
