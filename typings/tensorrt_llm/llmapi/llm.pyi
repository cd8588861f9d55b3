from collections.abc import Mapping
from typing import Any

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import GenerationResult, IterationResult
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.scheduling_params import SchedulingParams

# Origin: llmapi/llm.py, 00966934ce32e0603a33f8c922525cf3678afab4.
class RequestOutput(GenerationResult): ...

# Origin: llmapi/llm.py as of 1.4.0rc1 (92 689 characters). `generate_async` returns at once; it needs a running event loop for async use.
class LLM:
    def __init__(
        self,
        model: str,
        tokenizer: Any | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None: ...
    # Origin: as the class, a beta property; the key `ctx_info_endpoint` is inferred from DisaggregatedParams.
    @property
    def disaggregated_params(self) -> dict[str, Any]: ...
    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any | None = None,
        streaming: bool = False,
        kv_cache_retention_config: Any | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any | None = None,
        scheduling_params: SchedulingParams | None = None,
        conversation_params: Any | None = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput: ...
    def get_stats_async(self, timeout: float | None = 2) -> IterationResult: ...
    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult: ...
    def get_kv_cache_capacity(self) -> dict[str, int]: ...
    # Origin: serve/generator_proxy.py (1.4.0rc1), which calls it; False: a fatal error.
    def _check_health(self) -> bool: ...
    def shutdown(self) -> None: ...
